"""Runs stock's own writers in the interpreter, on our workloads, against our oracles.

`stock_writers_child.py OP FOLDER` (with `TRITON_INTERPRET=1`): FOLDER's `stock_writers.py` holds the op's kernels, cut out of a release's
files by the test. Prints one JSON line per case: `[id, bytes, different bytes, largest difference of a byte]`.

The interpreter multiplies and adds where a GPU's code has one fused step, and stock's norm sums in an order of its own.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
import triton.language as tl
from deepinfer_sm80.ops.indexer_k import workloads as indexer_k
from deepinfer_sm80.ops.indexer_q import workloads as indexer_q
from deepinfer_sm80.ops.kv_insert import workloads as kv_insert
from triton.runtime import interpreter as triton_interpreter

from deepinfer_cli.validate import interpreter


def cast_as_torch_does() -> None:
    """The interpreter's own cast to e4m3 loses the carry from the mantissa into the exponent."""
    builder, handle = triton_interpreter.InterpreterBuilder, triton_interpreter.TensorHandle
    stock = builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if dst_type.scalar != tl.float8e4nv:
            return stock(self, src, dst_type, rounding_mode)
        values = torch.from_numpy(src.data.astype("float32"))
        codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return handle(codes.numpy(), tl.float8e4nv)

    builder.create_fp_to_fp = create_fp_to_fp


def stock_insert(kernels: Any, **inputs: Any) -> None:
    """Launches stock's insert as its wrapper does."""
    cache, table, slots = inputs["kv_cache"], inputs["cos_sin_cache"], inputs["slot_mapping"]
    kernels._rope_quant_insert_kernel[(len(slots),)](
        inputs["latent"], inputs["positions"], table, cache, slots, COS_STRIDE=table.stride(0),
        CACHE_STRIDE=cache.stride(0), CACHE_BLOCK=cache.shape[1], COMPRESS_RATIO=inputs["compress_ratio"],
        SANITIZE_CACHE_NANS=False,
    )  # fmt: skip


def stock_store(kernels: Any, **inputs: Any) -> None:
    """Launches stock's key store as its wrapper does; from 0.33 on it can also pack scales."""
    keys, cache, table = inputs["k_pre"], inputs["k_cache"], inputs["cos_sin_cache"]
    kernel = kernels._indexer_k_norm_rope_quant_store_kernel
    packed = {"MX_SCALE": False} if "MX_SCALE" in kernel.arg_names else {}
    kernel[(len(inputs["slot_mapping"]),)](
        keys, keys.stride(0), inputs["positions"], inputs["norm_weight"], inputs["norm_eps"], table, table.stride(0),
        cache, inputs["slot_mapping"], cache.shape[1], HEAD_SIZE=128, ROPE_HEAD_DIM=64,
        COMPRESS_RATIO=inputs["compress_ratio"], TOKEN_STRIDE=128, SCALE_DIM=4, KV_BLOCK_STRIDE=cache.stride(0),
        FP8_MAX=448.0, USE_FP4=False, SHUFFLE=False, BLOCK_TILE_SIZE=16, HEAD_TILE_SIZE=16, **packed,
    )  # fmt: skip


def stock_queries(kernels: Any, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches stock's Triton kernel for queries as its wrapper does."""
    q, table, weights = inputs["q"], inputs["cos_sin_cache"], inputs["weights"]
    codes = torch.empty(q.shape, dtype=torch.float8_e4m3fn)
    folded = torch.empty(weights.shape)
    kernels.kernel[q.shape[:2]](
        pos_ptr=inputs["positions"], index_q_ptr=q, index_q_stride0=q.stride(0), index_q_stride1=q.stride(1),
        index_q_cos_sin_ptr=table, index_q_cos_sin_stride=table.stride(0), INDEX_Q_HALF_ROT_DIM=32,
        index_q_fp8_ptr=codes, index_q_fp8_stride0=codes.stride(0), index_q_fp8_stride1=codes.stride(1),
        INDEX_Q_HEAD_DIM=128, index_weights_ptr=weights, index_weights_stride=weights.stride(0),
        index_weights_softmax_scale=inputs["scale"], index_weights_head_scale=1.0, index_weights_out_ptr=folded,
        index_weights_out_stride=folded.stride(0),
    )  # fmt: skip
    return codes, folded


def check(workloads: Any, case: Any, function: Any) -> None:
    """One line: how many bytes of stock's are not the oracle's, and by how much."""
    inputs = workloads.make_inputs(case, "cpu")
    want = workloads.expected(case, inputs)
    got = workloads.run(inputs, function)
    pairs = [
        (got[name].contiguous().view(torch.uint8), want[name].contiguous().view(torch.uint8)) for name in want
    ]
    away = torch.cat([(one.int() - other.int()).abs().flatten() for one, other in pairs])
    print(json.dumps([case.id, len(away), int((away != 0).sum()), int(away.max())]))


OPS = {
    "kv_insert": (kv_insert, stock_insert),
    "indexer_k": (indexer_k, stock_store),
    "indexer_q": (indexer_q, stock_queries),
}


def main(op: str, folder: str) -> None:
    """The cases of finite values in which there is something to write."""
    interpreter.install()
    cast_as_torch_does()
    sys.path.insert(0, folder)
    kernels = importlib.import_module("stock_writers")
    workloads, function = OPS[op]
    for case in workloads.cases("smoke"):
        kind = case.params.get("kind")
        # what overflows is another thing there
        defined = kind != "nonfinite" and (kind != "edges" or workloads is kv_insert)
        if defined and case.params["tokens"] and case.params.get("heads", 1):
            check(workloads, case, lambda **inputs: function(kernels, **inputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
