"""The kernel that merges the splits of a token, and how every output ends: its share of the softmax, its rotation."""

from __future__ import annotations

import triton
import triton.language as tl

# a maximum below every score; finite, so that no difference of maxima is NaN
LOWEST = tl.constexpr(-3.0e38)
LOG2E = tl.constexpr(1.4426950408889634)
# bits of `given`: which of the optional arguments there are; 1 is the extra cache
SINK = tl.constexpr(2)
POSITIONS = tl.constexpr(4)

POINTERS = {"out_ptr": "*bf16", "part_ptr": "*fp32", "stats_ptr": "*fp32", "sink_ptr": "*fp32"}
POINTERS |= {"positions_ptr": "*i64", "cos_sin_ptr": "*fp32"}
STRIDES = ("out_stride_token", "out_stride_head", "cos_sin_stride")
SIZES = ("given", "heads", "splits")


@triton.jit(do_not_specialize=[*STRIDES, *SIZES], do_not_specialize_on_alignment=list(POINTERS))
def merge_kernel(
    out_ptr,
    part_ptr,
    stats_ptr,
    sink_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    cos_sin_stride: tl.int64,
    given: tl.int32,
    heads: tl.int32,
    splits: tl.int32,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, 512)
    start = token * splits * heads + head
    split = tl.arange(0, MAX_SPLITS)
    stats_ptrs = stats_ptr + 2 * (start + split * heads)
    largest = tl.load(stats_ptrs, mask=split < splits, other=LOWEST)
    total = tl.load(stats_ptrs + 1, mask=split < splits, other=0.0)
    top = tl.max(largest, 0)
    total = tl.sum(total * tl.exp2(largest - top), 0)
    sink = tl.load(sink_ptr + head, mask=(given & SINK) != 0, other=-float("inf")) * LOG2E
    factor = share(top, total, sink)

    acc = tl.zeros((512,), tl.float32)
    for begin in range(0, splits, CHUNK):
        some = begin + tl.arange(0, CHUNK)
        some_ptrs = stats_ptr + 2 * (start + some * heads)
        filled = tl.load(some_ptrs + 1, mask=some < splits, other=0.0) > 0.0
        weight = tl.exp2(tl.load(some_ptrs, mask=filled, other=LOWEST) - top) * factor
        part_ptrs = tl.multiple_of(part_ptr + (start + some * heads) * 512, 16)[:, None] + column[None, :]
        acc += tl.sum(tl.load(part_ptrs, mask=filled[:, None], other=0.0) * weight[:, None], 0)

    pair = tl.arange(0, 256) - 224
    rotated = (pair >= 0) & ((given & POSITIONS) != 0)
    cos, sin = load_angle(positions_ptr, cos_sin_ptr, cos_sin_stride, token, pair, rotated)
    even, odd = tl.split(tl.reshape(acc, (256, 2)))
    acc = tl.reshape(turn_back(even, odd, cos, sin), (512,))
    tl.store(out_ptr + token * out_stride_token + head * out_stride_head + column, acc.to(tl.bfloat16))


@triton.jit
def share(largest, total, sink):
    """What the sum of rows is multiplied with: 1 over the whole softmax, sink included; 0 for a head without rows."""
    top = tl.maximum(largest, sink)
    whole = total * tl.exp2(largest - top) + tl.exp2(sink - top)
    return tl.where(total > 0.0, tl.exp2(largest - top) / whole, 0.0)


@triton.jit
def load_angle(positions_ptr, cos_sin_ptr, stride, token, pair, mask):
    """Cosines and sines of pairs of columns; those of no rotation where `mask` is not set."""
    position = tl.load(positions_ptr + token + pair * 0, mask=mask, other=0)
    ptrs = cos_sin_ptr + position * stride + pair
    return tl.load(ptrs, mask=mask, other=1.0), tl.load(ptrs + 32, mask=mask, other=0.0)


@triton.jit
def turn_back(even, odd, cos, sin):
    return tl.join(even * cos + odd * sin, odd * cos - even * sin)
