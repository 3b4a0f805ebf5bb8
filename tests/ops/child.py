"""Runs in a process of its own, where `TRITON_INTERPRET=1` was set before Triton was imported.

`child.py numerics` or `child.py <op>`: prints one JSON line per check, `[name, ok, detail]`.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from deepinfer_sm80.numerics import e4m3, ue8m0
from deepinfer_sm80.ops.spec import Tolerance

from deepinfer_cli.validate import compare, interpreter

EXACT = Tolerance()


@triton.jit
def _convert_kernel(source_ptr, target_ptr, n, CONVERT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + index, CONVERT(tl.load(source_ptr + index, mask=index < n)), mask=index < n)


def convert(source: torch.Tensor, function: object, dtype: torch.dtype) -> torch.Tensor:
    """`function`, a jit helper, over a whole tensor."""
    target = torch.empty(source.shape, dtype=dtype)
    _convert_kernel[(triton.cdiv(source.numel(), 1024),)](source, target, source.numel(), function, 1024)
    return target


def floats_around_codes(values: list[float]) -> torch.Tensor:
    """Every value, every midpoint, their neighbours in float32, powers of two and random bits, with both signs."""
    exact = torch.tensor([v for v in values if v == v and v > 0], dtype=torch.float64).sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    near = torch.cat(
        [exact, middle, powers, torch.tensor([0.0, 448.0, 464.0, 480.0, float("inf"), float("nan")])]
    )
    near = near.float()
    bits = near.view(torch.int32)
    near = torch.cat([near, (bits + 1).view(torch.float32), (bits - 1).clamp(min=0).view(torch.float32)])
    random = (
        torch.randint(0, 1 << 31, (20000,), generator=torch.Generator().manual_seed(1))
        .int()
        .view(torch.float32)
    )
    return torch.cat([near, random])


def numerics() -> None:
    """Decode of every code and encode of every hard value, against the references."""
    codes = torch.arange(256, dtype=torch.uint8)
    for module in (e4m3, ue8m0):
        name = module.__name__.rpartition(".")[2]
        want = torch.tensor(module.reference_values(), dtype=torch.float64).float()
        report(f"{name}-decode", convert(codes, module.decode, torch.float32), want)
        hard = floats_around_codes(module.reference_values())
        hard = torch.cat([hard, -hard]) if module is e4m3 else hard
        # the reference is slow: a few thousand values are enough of the random ones
        hard = hard[torch.cat([torch.arange(min(len(hard), 4000)), torch.arange(0, len(hard), 7)])]
        want = torch.tensor([module.reference_encode(value) for value in hard.tolist()], dtype=torch.uint8)
        report(f"{name}-encode", convert(hard, module.encode, torch.uint8), want)


def workloads(op: str) -> None:
    """Every case that the interpreter can run, whole output buffers against the oracle's."""
    module = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
    for case in module.cases("full"):
        if case.gpu_only:
            continue
        inputs = module.make_inputs(case, "cpu")
        want = module.expected(case, inputs)
        tolerances = compare.tolerances_of(module, case)
        for name, got in module.run(inputs).items():
            bound = want.get(name + compare.BOUND)
            report(f"{case.id} {name}", got, want[name], tolerances[name], bound)


def report(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    tolerance: Any = EXACT,
    bound: torch.Tensor | None = None,
) -> None:
    """Prints a check's line: do they agree, and if not, where?"""
    verdict = compare.compare(name, got, want, tolerance, bound)
    print(json.dumps([name, verdict.ok, f"{verdict.reason} {verdict.first_bad}"]), flush=True)


if __name__ == "__main__":
    interpreter.install()
    numerics() if sys.argv[1] == "numerics" else workloads(sys.argv[1])
