"""UE8M0, a scale that is a power of two: code c is 2^(c-127), 255 is NaN."""

from __future__ import annotations

import math

import triton
import triton.language as tl


@triton.jit
def decode(code):
    """Values of UE8M0 codes as float32, exact for all 256.

    Code 0, 2^-127, is a float32 subnormal: kernels that multiply by it must not flush subnormals (Triton's `*` on
    float32 does not).

    Args:
        code: uint8 tensor, any shape.
    """
    wide = code.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode(value):
    """Codes (uint8) of the smallest powers of two that are not below `value`, a float32 tensor >= 0.

    Saturates at code 254; NaN becomes 255; 0 becomes code 0. This is `cvt.rp.satfinite.ue8m0x2.f32`, and on the
    range that stock's writers can produce equals their `ceil(log2(value)) + 127`.
    """
    bits = value.to(tl.int32, bitcast=True)
    code = tl.minimum((bits + 0x7FFFFF) >> 23, 254)
    # 2^-127 and everything below it
    code = tl.where(bits <= 0x00400000, 0, code)
    return tl.where(value != value, 255, code).to(tl.uint8)


def reference_values() -> list[float]:
    """The 256 values by the format's definition, as Python floats."""
    return [2.0 ** (code - 127) for code in range(255)] + [math.nan]


def reference_encode(value: float) -> int:
    """The code of the smallest power of two that is not below `value` (>= 0)."""
    if math.isnan(value):
        return 255
    return next((code for code in range(255) if 2.0 ** (code - 127) >= value), 254)
