"""The kernel that attends: to all rows of a token, or to those of one split."""

# mypy: disable-error-code="assignment,misc"
# (tuples that grow in unrolled loops are tuples of one length to it)
from __future__ import annotations

import triton
import triton.language as tl

from .merge import LOG2E, LOWEST, POSITIONS, SINK, load_angle, share, turn_back
from .records import decode, load_slots, load_words, locate, scrub

# the lowest bit of `given`, beside those of the merge
EXTRA = tl.constexpr(1)

POINTERS = {"q_ptr": "*bf16", "out_ptr": "*bf16", "part_ptr": "*fp32", "stats_ptr": "*fp32"}
for _name in ("swa", "extra"):
    POINTERS |= {f"{_name}_ptr": "*u8", f"{_name}_indices_ptr": "*i32", f"{_name}_indptr_ptr": "*i32"}
POINTERS |= {"sink_ptr": "*fp32", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32"}
STRIDES = (
    "q_stride_token",
    "q_stride_head",
    "out_stride_token",
    "out_stride_head",
    "swa_stride",
    "extra_stride",
)
STRIDES += ("swa_inverse", "extra_inverse", "cos_sin_stride")
SIZES = (
    "swa_rows",
    "extra_rows",
    "swa_block",
    "extra_block",
    "given",
    "swa_shift",
    "extra_shift",
    "heads",
    "splits",
)


@triton.jit(do_not_specialize=[*STRIDES, *SIZES, "scale"], do_not_specialize_on_alignment=list(POINTERS))
def attend_kernel(
    q_ptr,
    out_ptr,
    part_ptr,
    stats_ptr,
    swa_ptr,
    swa_indices_ptr,
    swa_indptr_ptr,
    extra_ptr,
    extra_indices_ptr,
    extra_indptr_ptr,
    sink_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    swa_stride: tl.int64,
    extra_stride: tl.int64,
    swa_inverse: tl.int64,
    extra_inverse: tl.int64,
    cos_sin_stride: tl.int64,
    swa_rows: tl.int32,
    extra_rows: tl.int32,
    swa_block: tl.int32,
    extra_block: tl.int32,
    given: tl.int32,
    swa_shift: tl.int32,
    extra_shift: tl.int32,
    heads: tl.int32,
    splits: tl.int32,
    scale: tl.float32,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
):
    split = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    used = head < heads
    row = tl.arange(0, BLOCK_K)
    column = tl.arange(0, 64)

    swa_begin = tl.load(swa_indptr_ptr + token)
    swa_end = tl.load(swa_indptr_ptr + token + 1)
    extra_begin = tl.load(extra_indptr_ptr + token, mask=(given & EXTRA) != 0, other=0)
    extra_end = tl.load(extra_indptr_ptr + token + 1, mask=(given & EXTRA) != 0, other=0)
    # a tile has rows of one cache only; a split is a run of tiles
    swa_tiles = tl.cdiv(swa_end - swa_begin, BLOCK_K)
    tiles = swa_tiles + tl.cdiv(extra_end - extra_begin, BLOCK_K)
    first = tiles * split // splits
    last = tiles * (split + 1) // splits

    # q and the accumulators come in slices of 64 columns: 7 groups of codes, each with its scale, and the tail
    q_row = tl.multiple_of(q_ptr + token * q_stride_token + head * q_stride_head, ALIGN)
    q = ()
    acc = ()
    for part in tl.static_range(8):
        acc += (tl.zeros((BLOCK_H, 64), tl.float32),)
        if part < 7:
            q += (tl.load(q_row[:, None] + (part * 64 + column)[None, :], mask=used[:, None], other=0.0),)
    largest = tl.full((BLOCK_H,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)

    swa = (
        swa_ptr,
        swa_stride,
        swa_inverse,
        swa_block,
        swa_rows,
        swa_indices_ptr,
        swa_begin,
        swa_end,
        swa_shift,
    )
    extra = (
        extra_ptr,
        extra_stride,
        extra_inverse,
        extra_block,
        extra_rows,
        extra_indices_ptr,
        extra_begin - swa_tiles * BLOCK_K,
        extra_end,
        extra_shift,
    )
    slot = load_slots(swa, extra, first, swa_tiles, last, row, BLOCK_K)
    for tile in range(first, last):
        valid, data_ptr, scales = locate(swa, extra, tile < swa_tiles, slot, ALIGN)
        # all of them before the first is used, and the next tile's slots behind them
        words = ()
        for part in tl.static_range(8):
            words += (load_words(data_ptr, valid, part, ALIGN),)
        slot = load_slots(swa, extra, tile + 1, swa_tiles, last, row, BLOCK_K)
        # the weights lie in shared memory where the tail of q lay, so it is read again for each tile: without that the
        # small variant is 1 KiB too large for 48 KiB, and the large one for sm86. min() is 0; it keeps the load in here
        q_tail_row = tl.multiple_of(q_row + tl.minimum(tile, 0) * 8, ALIGN)
        q_tail = tl.load(q_tail_row[:, None] + (448 + column)[None, :], mask=used[:, None], other=0.0)
        kv = ()
        for part in tl.static_range(7):
            kv += (decode(words[part], (scales >> (8 * part)).to(tl.int32) & 255, BLOCK_K),)
        kv += (scrub(words[7], BLOCK_K),)

        # two chains of sums: a product waits for the one before it
        even_score = tl.dot(q[0], tl.trans(kv[0]))
        odd_score = tl.dot(q[1], tl.trans(kv[1]))
        for part in tl.static_range(2, 7, 2):
            even_score = tl.dot(q[part], tl.trans(kv[part]), even_score)
        for part in tl.static_range(3, 7, 2):
            odd_score = tl.dot(q[part], tl.trans(kv[part]), odd_score)
        score = even_score + tl.dot(q_tail, tl.trans(kv[7]), odd_score)
        score = tl.where(valid[None, :], score * (scale * LOG2E), -float("inf"))
        top = tl.maximum(largest, tl.max(score, 1))
        shrink = tl.exp2(largest - top)
        weight = tl.exp2(score - top[:, None])
        largest = top
        total = total * shrink + tl.sum(weight, 1)
        weight = weight.to(tl.bfloat16)
        new_acc = ()
        for part in tl.static_range(8):
            new_acc += (tl.dot(weight, kv[part], acc[part] * shrink[:, None]),)
        acc = new_acc

    if splits == 1:
        sink = tl.load(sink_ptr + head, mask=used & ((given & SINK) != 0), other=-float("inf")) * LOG2E
        factor = share(largest, total, sink)[:, None]
        out_row = tl.multiple_of(out_ptr + token * out_stride_token + head * out_stride_head, ALIGN)
        out_ptrs = out_row[:, None] + column[None, :]
        for part in tl.static_range(7):
            value = acc[part] * factor
            tl.store(out_ptrs + part * 64, value.to(tl.bfloat16), mask=used[:, None])
        pair = tl.arange(0, 32)
        rotated = (given & POSITIONS) != 0
        cos, sin = load_angle(positions_ptr, cos_sin_ptr, cos_sin_stride, token, pair, rotated)
        even, odd = tl.split(tl.reshape(acc[7] * factor, (BLOCK_H, 32, 2)))
        value = turn_back(even, odd, cos[None, :], sin[None, :])
        value = tl.reshape(value, (BLOCK_H, 64))
        tl.store(out_ptrs + 448, value.to(tl.bfloat16), mask=used[:, None])
    else:
        at = (token * splits + split) * heads + head
        tl.store(stats_ptr + 2 * at, largest, mask=used)
        tl.store(stats_ptr + 2 * at + 1, total, mask=used)
        # a split without rows leaves its part as it is; the merge sees that its total is 0
        stored = (used & (first < last))[:, None]
        part_ptrs = tl.multiple_of(part_ptr + at * 512, 16)[:, None] + column[None, :]
        for part in tl.static_range(8):
            tl.store(part_ptrs + part * 64, acc[part], mask=stored)
