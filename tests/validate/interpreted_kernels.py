"""Run in a child with TRITON_INTERPRET=1: the repaired interpreter against torch. Exits 1 with words if it differs."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from deepinfer_cli.validate import interpreter


@triton.jit
def _cast_kernel(x_ptr, bf16_ptr, back_ptr, N: tl.constexpr):
    offset = tl.arange(0, N)
    narrow = tl.load(x_ptr + offset).to(tl.bfloat16)
    tl.store(bf16_ptr + offset, narrow)
    tl.store(back_ptr + offset, narrow.to(tl.float32))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + rows * N + columns), tl.load(b_ptr + rows * N + columns)
    tl.store(out_ptr + rows * N + columns, tl.dot(a, b))


def cast_is_torch_cast() -> bool:
    special = [
        0.0,
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        3.4e38,
        1e-40,
        9.2e-41,
        1.00390625,
        1.01171875,
    ]
    x = torch.cat([torch.tensor(special), torch.randn(1024 - len(special)) * 1e3])
    narrow, back = torch.empty(1024, dtype=torch.bfloat16), torch.empty(1024)
    _cast_kernel[(1,)](x, narrow, back, N=1024)
    want = x.to(torch.bfloat16)
    numbers = ~want.isnan()
    same = torch.equal(narrow.view(torch.int16)[numbers], want.view(torch.int16)[numbers])
    return same and bool(narrow.isnan()[~numbers].all()) and torch.equal(back[numbers], want.float()[numbers])


def dot_is_torch_dot(dtype: torch.dtype) -> bool:
    a, b = (torch.randn(32, 32).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, out, N=32)
    return torch.allclose(out, a.float() @ b.float(), atol=1e-4, rtol=1e-5)


@triton.jit
def _loop_kernel(bound_ptr, out_ptr):
    total = 0
    for step in range(0, tl.load(bound_ptr)):
        total += step
    tl.store(out_ptr, total)


def loops_to_a_loaded_bound() -> bool:
    out = torch.zeros(1, dtype=torch.int32)
    try:
        _loop_kernel[(1,)](torch.tensor([5], dtype=torch.int32), out)
    except triton.runtime.errors.InterpreterError:
        return False
    return out.item() == 10


@triton.jit
def _fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.fma(tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(z_ptr + at)))


def fma_rounds_once() -> bool:
    """Against exact fractions, products that nearly cancel and sums just off the middle of two floats among them."""
    x, y, z = torch.randn(1024), torch.randn(1024), torch.randn(1024)
    z[:500] = -(x[:500] * y[:500]) * (1 + 2.0**-20 * torch.randn(500))
    # 1 + 2^-24 is the middle of two floats; what decides is 2^-80 of it
    x[1000:1004], y[1000:1004] = 2.0**-40, torch.tensor([2.0**-40, -(2.0**-40), 2.0**-30, 0.0])
    z[1000:1004] = 1.0
    x[1004:1008] = torch.tensor([1 + 2.0**-12, 1 - 2.0**-12, -1 - 2.0**-12, 1 + 2.0**-12])
    y[1004:1008], z[1004:1008] = 1 + 2.0**-12, 2.0**-60
    out = torch.empty(1024)
    _fma_kernel[(1,)](x, y, z, out, N=1024)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c)
        for a, b, c in zip(*(t.tolist() for t in (x, y, z)), strict=True)
    ]
    return out.tolist() == [nearest(value) for value in exact]


def nearest(value: Fraction) -> float:
    """The float32 nearest to a fraction that is not subnormal, ties to even."""
    if value == 0:
        return 0.0
    step = Fraction(2) ** (math.frexp(value)[1] - 24)
    # the exponent that float64 gives may be that of the next power of two
    return float(round(value / step) * step)


def convert_like_triton_3_6_under_numpy_2_5() -> None:
    stock = triton_interpreter._patch_lang_tensor

    def patch(tensor, scope):
        stock(tensor, scope)
        # an array of one element has no __index__ unless it has no dimension
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.__index__())

    triton_interpreter._patch_lang_tensor = patch


def main() -> int:
    torch.manual_seed(0)
    convert_like_triton_3_6_under_numpy_2_5()
    if "--stock" not in sys.argv:
        interpreter.install()
        interpreter.install()
    checks = {
        "cast": cast_is_torch_cast(),
        "loop": loops_to_a_loaded_bound(),
        "fma": fma_rounds_once(),
        **{
            f"dot {dtype}": dot_is_torch_dot(dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        },
    }
    wrong = [name for name, ok in checks.items() if not ok]
    print(", ".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
