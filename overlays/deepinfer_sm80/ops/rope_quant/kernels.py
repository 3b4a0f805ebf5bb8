"""Triton helpers: rotate pairs, find the power-of-two scale of a group, encode.

Each step rounds as stock's kernels do: a rotation is one product, then one fused multiply-add, which is what the
compilers of both of stock's languages make of `even * cos - odd * sin` and `odd * cos + even * sin`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics import e4m3

_INFINITY = tl.constexpr(0x7F80)
_INVERSE_MAX = tl.constexpr(1.0 / 448.0)


@triton.jit
def rotate(even, odd, cos, sin):
    """GPT-J rotation of float32 pairs: `(even, odd)` of the result, each rounded twice."""
    # Triton before 3.8 makes 0 - x of -x, which is no -0 for 0
    return tl.fma(even, cos, odd * sin * -1.0), tl.fma(odd, cos, even * sin)


@triton.jit
def bits_of(value):
    """The 16 bits of bf16 values as int32, 0 to 65535."""
    return value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def size_of(bits):
    """What `scale_of` takes the maximum of: the magnitude bits of bf16 values, 0 for NaN."""
    size = bits & 0x7FFF
    return tl.where(size > _INFINITY, 0, size)


@triton.jit
def scale_of(largest):
    """Code of the smallest power of two that is not below max(amax, 1e-4) / 448; 255 if amax is infinite.

    Args:
        largest: the group's amax, as `size_of` gives it.
    """
    amax = (largest << 16).to(tl.float32, bitcast=True)
    # never subnormal; 448 and the powers of two below and above it divide to exact powers of two
    ratio = tl.maximum(amax, 1e-4) * _INVERSE_MAX
    return (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def encode(bits, scale):
    """e4m3 codes (int32) of bf16 values divided by their group's scale; NaN and infinities become 0x7f.

    Args:
        bits: as `bits_of` gives them.
        scale: the group's code, from `scale_of`, of a shape that broadcasts.
    """
    factor = tl.where(scale < 255, (254 - scale) << 23, 0).to(tl.float32, bitcast=True)
    value = (bits << 16).to(tl.float32, bitcast=True)
    code = e4m3.encode(value * factor).to(tl.int32)
    return tl.where((bits & 0x7FFF) >= _INFINITY, 0x7F, code)


@triton.jit
def scale_value(scale):
    """The scale itself as float32; infinity for code 255."""
    return (scale << 23).to(tl.float32, bitcast=True)
