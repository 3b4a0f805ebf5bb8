"""Runs stock's own Triton kernels in the interpreter, on our workloads, against our oracles.

`stock_child.py CACHE_UTILS FOLDER VERSION` (with `TRITON_INTERPRET=1`): the kernels are cut out of that file into a module in FOLDER,
because a jit function needs a source file. Prints one JSON line per case, `[id, ok, reason]`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import stock_source
import torch
from deepinfer_sm80.ops.combine import workloads as combine
from deepinfer_sm80.ops.gather import workloads as gather

from deepinfer_cli.validate import compare, interpreter

KERNELS = ("_dequantize_and_gather_k_kernel", "CombineTopkSwaIndicesKernel.kernel")


def cut_out(source: Path, folder: Path) -> Any:
    """A module that holds stock's two kernels and nothing else."""
    head = "import triton\nimport triton.language as tl\n"
    return stock_source.module("stock_kernels", [head, *stock_source.kernels(source, KERNELS)], folder)


def stock_gather(kernels: Any, **inputs: Any) -> None:
    """Launches stock's gather as its wrapper does; its constants are those of the record."""
    out, cache, table = inputs["out"], inputs["k_cache"], inputs["block_table"]
    kernels._dequantize_and_gather_k_kernel[(len(inputs["seq_lens"]), 8)](
        out, out.stride(0), out.stride(1), cache, inputs["seq_lens"], table, inputs["offset"], inputs["gather_lens"],
        max_blocks_per_seq=table.shape[-1], fp8_dim=448, bf16_dim=64, scale_dim=8, quant_block=64,
        cache_block_size=inputs["block_size"], token_data_size=576, block_stride=cache.stride(0), output_dim=512,
        fp8_max=448.0, n_quant_blocks=7,
    )  # fmt: skip


def stock_combine(kernels: Any, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Fills with -1 and launches stock's combine as its wrapper does."""
    indices, lens = inputs["out"]
    indices.fill_(-1)
    topk = inputs["topk_indices"]
    images = {"left_visible_ptr": None, "right_visible_ptr": None, "IMAGE_WIDTH": 0}
    known = kernels.kernel.arg_names
    kernels.kernel[(len(inputs["seq_lens"]), 4)](
        combined_indices_ptr=indices, combined_indices_stride=indices.stride(0), combined_lens_ptr=lens,
        topk_indices_ptr=topk, topk_indices_stride=topk.stride(0), query_start_loc_ptr=inputs["query_start_loc"],
        seq_lens_ptr=inputs["seq_lens"], gather_lens_ptr=inputs["gather_lens"], M=inputs["M"], N=inputs["N"],
        TOP_K=inputs["topk"], COMPRESS_RATIO=inputs["compress_ratio"], WINDOW_SIZE=inputs["window_size"],
        PADDED_TOP_K=1 << max(topk.shape[1] - 1, 0).bit_length(),
        **{name: value for name, value in images.items() if name in known},
    )  # fmt: skip
    return indices, lens


def check(workloads: Any, case: Any, function: Any) -> None:
    """One line: does stock give what the oracle gives?"""
    inputs = workloads.make_inputs(case, "cpu")
    want = workloads.expected(case, inputs)
    verdict = compare.compare_outputs(workloads.run(inputs, function), want, workloads.TOLERANCES)
    print(json.dumps([case.id, verdict.ok, verdict.reason]), flush=True)


def main(source: Path, folder: Path, version: str) -> None:
    """Every case on which stock's result is defined: see the ops' docstrings for the others."""
    interpreter.install()
    kernels = cut_out(source, folder)
    timed = gather.bench_cases()[0]
    short = replace(timed, params={**timed.params, "tokens": 70})
    for case in [each for each in gather.cases("smoke") if each.name == "what-stock-writes"] + [short]:
        check(gather, case, lambda **inputs: stock_gather(kernels, **inputs))
    for case in combine.cases("smoke"):
        params = {"contract": "common", "window": 128, "spare_tokens": 0, "int64": False, **case.params}
        # its window is a tile, so a power of two; it reads past narrow rows, and leaves tokens of no request undefined
        defined = params["window"].bit_count() == 1 and "W" not in params and not params["spare_tokens"]
        if (
            params["contract"] != ("common-0.30" if version == "0.30.0" else "common")
            or params["int64"]
            or not defined
        ):
            continue
        if version < "0.32":
            # holes are kept there, and lengths go below zero
            case = replace(case, params={**case.params, "holes": 0.0})
            if "negative" in case.name:
                continue
        check(combine, case, lambda **inputs: stock_combine(kernels, **inputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
