"""Device functions of sparse decode that read a tile of records: slots, addresses, codes, values."""

from __future__ import annotations

import triton
import triton.language as tl

_REBIAS = tl.constexpr(2.0**120)


@triton.jit
def load_slots(swa, extra, tile, swa_tiles, last, row, BLOCK_K: tl.constexpr):
    """The slots of a tile; -1 after the list's end and in tiles from `last` on."""
    is_swa = tile < swa_tiles
    at = tl.where(is_swa, swa[6], extra[6]) + tile * BLOCK_K + row
    inside = (at < tl.where(is_swa, swa[7], extra[7])) & (tile < last)
    return tl.load(tl.where(is_swa, swa[5], extra[5]) + at, mask=inside, other=-1)


@triton.jit
def locate(swa, extra, is_swa, slot, ALIGN: tl.constexpr):
    """Which slots are valid, where their records begin, and the 8 bytes with their scales as int64."""
    block = tl.where(is_swa, swa[3], extra[3])
    valid = (slot >= 0) & (slot < tl.where(is_swa, swa[4], extra[4]))
    slot = tl.where(valid, slot, 0)
    # divided by the block size
    page = (slot.to(tl.int64) * tl.where(is_swa, swa[2], extra[2])) >> tl.where(is_swa, swa[8], extra[8])
    page_row = slot - page.to(tl.int32) * block
    page_ptr = tl.where(is_swa, swa[0], extra[0]) + page * tl.where(is_swa, swa[1], extra[1])
    scale_ptr = page_ptr + (block * 576 + page_row * 8)
    if ALIGN == 16:
        scales = tl.load(scale_ptr.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    else:
        scales = tl.load(scale_ptr, mask=valid, other=0).to(tl.int64)
        for byte in tl.static_range(1, 8):
            scales |= tl.load(scale_ptr + byte, mask=valid, other=0).to(tl.int64) << (8 * byte)
    return valid, tl.multiple_of(page_ptr + page_row * 576, ALIGN), scales


@triton.jit
def load_words(data_ptr, valid, part: tl.constexpr, ALIGN: tl.constexpr):
    """One of 7 groups of 16 words with codes, or the 32 of the tail, as `[rows, words, 1]`: they can be widened where they
    lie, for the values of a word follow each other.
    """
    index = part * 16 + tl.arange(0, 16 if part < 7 else 32)
    if ALIGN == 16:
        ptrs = (data_ptr.to(tl.pointer_type(tl.int32))[:, None] + index[None, :])[:, :, None]
        return tl.load(ptrs, mask=valid[:, None, None], other=0)
    ptrs = (data_ptr[:, None] + 4 * index[None, :])[:, :, None]
    words = tl.load(ptrs, mask=valid[:, None, None], other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        words |= tl.load(ptrs + byte, mask=valid[:, None, None], other=0).to(tl.int32) << (8 * byte)
    return words


@triton.jit
def decode(words, scale, BLOCK_K: tl.constexpr):
    """The 64 values under one scale as bfloat16 `[rows, 64]`, NaN as 0.

    Not by `numerics.e4m3`: widening by `tl.join`, as gather does, makes Triton choose an operand layout that it cannot
    load from shared memory by ldmatrix, and decode once for each product.
    """
    code = tl.reshape(tl.broadcast_to(words, (BLOCK_K, 16, 4)), (BLOCK_K, 64))
    code = code << (24 - 8 * (tl.arange(0, 64) % 4))[None, :]
    # a float32 that is 2^-120 of the value, for subnormal codes too; 480 is what the NaN codes would have been
    value = ((code >> 4) & -0x78100000).to(tl.float32, bitcast=True) * _REBIAS
    value = tl.where(tl.abs(value) > 448.0, 0.0, value)
    # code 0 is 2^-127, a subnormal; under NaN everything is 0
    factor = tl.where(scale == 0, 0x00400000, scale << 23)
    factor = tl.where(scale == 255, 0, factor).to(tl.float32, bitcast=True)
    return (value * factor[:, None]).to(tl.bfloat16)


@triton.jit
def scrub(words, BLOCK_K: tl.constexpr):
    """The 64 values of the tail, bfloat16 `[rows, 64]`, NaN as 0."""
    bits = tl.reshape(tl.broadcast_to(words, (BLOCK_K, 32, 2)), (BLOCK_K, 64))
    bits = bits >> (16 * (tl.arange(0, 64) % 2))[None, :]
    bits = tl.where((bits & 0x7FFF) > 0x7F80, 0, bits)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
