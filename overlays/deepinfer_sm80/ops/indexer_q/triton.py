"""The kernel of `indexer_q`, its launch, and the table of its variants."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..rope_quant import kernels
from ..spec import Variant

_POINTERS = {"positions_ptr": "*i64", "q_ptr": "*bf16", "cos_sin_ptr": "*fp32", "weights_ptr": "*bf16"}
_POINTERS |= {"codes_ptr": "*u8", "folded_ptr": "*fp32"}
_STRIDES = ("q_stride_token", "q_stride_head", "cos_sin_stride", "weights_stride")


@triton.jit(
    do_not_specialize=[*_STRIDES, "heads", "factor"],
    do_not_specialize_on_alignment=list(_POINTERS),
)
def _indexer_q_kernel(
    positions_ptr,
    q_ptr,
    cos_sin_ptr,
    weights_ptr,
    codes_ptr,
    folded_ptr,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    cos_sin_stride: tl.int64,
    weights_stride: tl.int64,
    heads: tl.int32,
    factor,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = head < heads
    pair = tl.arange(0, 64)
    turned = pair >= 32

    # a word is a pair of elements
    row_ptr = tl.multiple_of(q_ptr + token * q_stride_token + head.to(tl.int64) * q_stride_head, UNIT)
    word_ptr = row_ptr.to(tl.pointer_type(tl.int32))[:, None] + pair[None, :]
    words = tl.load(word_ptr, mask=valid[:, None], other=0)
    turn_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride + pair - 32
    cos = tl.load(turn_ptr, mask=turned, other=1.0)[None, :]
    sin = tl.load(turn_ptr + 32, mask=turned, other=0.0)[None, :]

    low, high = words & 0xFFFF, (words >> 16) & 0xFFFF
    even, odd = kernels.rotate(_value(low), _value(high), cos, sin)
    low = tl.where(turned[None, :], kernels.bits_of(even.to(tl.bfloat16)), low)
    high = tl.where(turned[None, :], kernels.bits_of(odd.to(tl.bfloat16)), high)
    scale = kernels.scale_of(tl.max(tl.maximum(kernels.size_of(low), kernels.size_of(high)), axis=1))
    codes = kernels.encode(low, scale[:, None]) | (kernels.encode(high, scale[:, None]) << 8)

    row = token * heads + head
    out_ptr = tl.multiple_of(codes_ptr + row * 128, 16).to(tl.pointer_type(tl.uint16))
    tl.store(out_ptr[:, None] + pair[None, :], codes.to(tl.uint16), mask=valid[:, None])
    weight = tl.load(weights_ptr + token * weights_stride + head, mask=valid, other=0.0).to(tl.float32)
    tl.store(folded_ptr + row, weight * factor * kernels.scale_value(scale), mask=valid)


@triton.jit
def _value(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


def _variant(name: str, unit: int) -> Variant:
    return Variant(
        name=name,
        kernel=_indexer_q_kernel,
        signature=_POINTERS | dict.fromkeys(_STRIDES, "i64") | {"heads": "i32", "factor": "fp32"},
        constexprs={"ROWS": 16, "UNIT": unit},
        num_warps=4,
        num_stages=1,
    )


# the queries of every release take the first; the other serves rows on any word
WIDE = _variant("wide", 16)
NARROW = _variant("narrow", 4)


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in (WIDE, NARROW) if arch in variant.archs)


def pick(q: torch.Tensor) -> Variant:
    """The variant for the queries' address and strides; what is written was allocated on 16-byte boundaries."""
    addresses = q.data_ptr() | 2 * q.stride(0) | 2 * q.stride(1)
    return WIDE if addresses % WIDE.constexprs["UNIT"] == 0 else NARROW


def launch(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    codes: torch.Tensor,
    folded: torch.Tensor,
) -> None:
    """Launches the kernel on checked arguments, one program per token and 16 heads."""
    variant = pick(q)
    heads = q.shape[1]
    _indexer_q_kernel[(q.shape[0], -(-heads // variant.constexprs["ROWS"]))](
        positions,
        q,
        cos_sin_cache,
        weights,
        codes,
        folded,
        q.stride(0),
        q.stride(1),
        cos_sin_cache.stride(0),
        weights.stride(0),
        heads,
        float(scale),
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
