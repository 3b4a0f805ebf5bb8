"""e4m3fn in integer arithmetic, for GPUs on which Triton has no fp8 type (compute capability below 8.9).

One sign bit, four exponent bits (bias 7), three mantissa bits; no infinity; 0x7f and 0xff are NaN; largest value 448.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

MAX = 448.0
_REBIAS = tl.constexpr(2.0**120)


@triton.jit
def decode(code):
    """Values of e4m3 codes (uint8 tensor) as float32, exact for all 256."""
    return decode_top_byte(code.to(tl.int32) << 24)


@triton.jit
def decode_top_byte(word):
    """Values of the e4m3 codes in bits 24..31 of an int32 tensor as float32; the lower bits do not matter.

    Codes that come four to a word cost one shift each this way.
    """
    # the magnitude goes to bits 20..26, the sign stays (the shift is arithmetic): a float32 that is 2^-120 of the
    # value, for subnormal codes too
    bits = (word >> 4) & -0x78100000
    value = bits.to(tl.float32, bitcast=True) * _REBIAS
    # 480 is what the NaN codes would have been
    return tl.where(tl.abs(value) > 448.0, float("nan"), value)


@triton.jit
def encode(value):
    """e4m3 codes (uint8) of float32 values: round to nearest even, saturating at 448, NaN as 0x7f with the value's sign.

    Infinities saturate as well. This is `cvt.rn.satfinite.e4m3x2.f32`, except that the instruction drops a NaN's
    sign; stock's writers clamp to 448 before they cast, with equal results. PyTorch's own cast does not saturate:
    beyond 464 it gives NaN.
    """
    raw = value.to(tl.int32, bitcast=True)
    size = raw & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # adding 2^14 leaves multiples of 2^-9, the subnormal step, in the low mantissa bits, rounded to nearest even
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((raw >> 24) & 0x80)).to(tl.uint8)


def reference_values() -> list[float]:
    """The 256 values by the format's definition, as Python floats."""
    return [_value(code) for code in range(256)]


def reference_encode(value: float) -> int:
    """The code of `value`: the nearest of the 256 values, ties to the even code."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    if math.isnan(value):
        return 0x7F | sign
    size = min(abs(value), MAX)
    return sign | min(range(0x7F), key=lambda code: (abs(_value(code) - size), code & 1))


def _value(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 0x7
    if code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)
