"""Run in a child with TRITON_INTERPRET=1: the repaired interpreter against torch. Exits 1 with words if it differs."""

from __future__ import annotations

import sys

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
