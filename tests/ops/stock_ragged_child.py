"""Runs stock's own ragged build in Triton's interpreter, on our workloads, against our oracle.

`stock_ragged_child.py MODULE FOLDER` (with `TRITON_INTERPRET=1`): the function and its kernels are cut out of that file
into a module in FOLDER, because a jit function needs a source file. Prints one JSON line per case, `[id, ok]`.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stock_source
import torch
from deepinfer_sm80.ops.ragged import workloads

from deepinfer_cli.validate import interpreter

FUNCTION = "build_ragged_indices_from_dense"
KERNELS = (
    "_pack_dense_prefix_to_ragged_kernel",
    "_count_valid_row_entries_kernel",
    "_compact_dense_row_to_ragged_kernel",
)


def cut_out(source: Path, folder: Path) -> Any:
    """A module that holds stock's function and its kernels and nothing else."""
    body = ast.parse(source.read_text(encoding="utf-8")).body
    parts = ["import torch\nimport triton\nimport triton.language as tl\n"]
    parts += [
        ast.unparse(node)
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name in (FUNCTION, *KERNELS)
    ]
    return stock_source.module("stock_ragged", parts, folder)


def check(case: Any, stock: Callable[..., Any]) -> None:
    """One line: are stock's starts and the entries it defines the oracle's?"""
    inputs = workloads.make_inputs(case, "cpu")
    want = workloads.expected(case, inputs)
    flat, indptr = stock(**workloads.call_kwargs(inputs, "stock"))
    count = int(indptr[-1])
    same = torch.equal(indptr, want["indptr"]) and torch.equal(flat[:count], want["flat"][:count])
    print(json.dumps([case.id, same and flat.shape == want["flat"].shape]), flush=True)


def main(source: Path, folder: Path) -> None:
    """Every case of the contract that this release has; stock takes no int64, no columns that lie apart and no empty batch."""
    interpreter.install()
    module = cut_out(source, folder)
    compact = hasattr(module, "_count_valid_row_entries_kernel")
    for case in workloads.cases("smoke"):
        params = {"compact": True, "int64": False, "column_stride": 1, **case.params}
        taken = not params["int64"] and params["column_stride"] == 1 and params["tokens"]
        if taken and params["compact"] == compact:
            check(case, getattr(module, FUNCTION))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
