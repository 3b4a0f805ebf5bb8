"""The gather kernel, its launch, and the table of its variants."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import gate
from ...numerics import e4m3, ue8m0
from ..spec import Variant

_POINTERS = {"out_ptr": "*bf16", "k_cache_ptr": "*u8"}
_POINTERS |= dict.fromkeys(("seq_lens_ptr", "gather_lens_ptr", "block_table_ptr"), "*i32")
_STRIDES = ("out_stride_req", "out_stride_row", "page_stride", "table_stride")
_SIZES = ("block_size", "offset", "capacity", "workers")


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES], do_not_specialize_on_alignment=list(_POINTERS))
def _gather_kernel(
    out_ptr,
    k_cache_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    block_table_ptr,
    out_stride_req: tl.int64,
    out_stride_row: tl.int64,
    page_stride: tl.int64,
    table_stride: tl.int64,
    block_size: tl.int32,
    offset: tl.int32,
    capacity: tl.int32,
    workers: tl.int32,
    ROWS: tl.constexpr,
    LOAD_BYTES: tl.constexpr,
    STORE_BYTES: tl.constexpr,
):
    request = tl.program_id(0) // workers
    worker = tl.program_id(0) % workers
    seq_len = tl.load(seq_lens_ptr + request)
    # position of the token that goes to row `offset`; negative if more is asked for than there is
    origin = seq_len - tl.load(gather_lens_ptr + request)
    begin = tl.maximum(origin, 0)
    end = tl.minimum(seq_len, origin + capacity)
    table_ptr = block_table_ptr + request * table_stride
    out_ptr += request * out_stride_req + (offset - origin).to(tl.int64) * out_stride_row

    # a tile is ROWS slots of one page, so that all its addresses come from one block table entry
    slot = tl.arange(0, ROWS)
    # 448 codes are 7 groups of 16 words; a tile's shape is a power of two, so there are 8, one masked
    group = tl.arange(0, 8)
    word = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    code = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    tail = tl.arange(0, 64)

    tiles_per_page = tl.cdiv(block_size, ROWS)
    first_tile = begin // block_size * tiles_per_page
    for tile in range(first_tile + worker, tl.cdiv(end, block_size) * tiles_per_page, workers):
        entry = tile // tiles_per_page
        slot0 = tile % tiles_per_page * ROWS
        pos0 = entry * block_size + slot0
        valid = (slot + slot0 < block_size) & (slot + pos0 >= begin) & (slot + pos0 < end)
        page_ptr = k_cache_ptr + tl.load(table_ptr + entry).to(tl.int64) * page_stride
        data_ptr = tl.multiple_of(page_ptr + slot0 * 576, LOAD_BYTES) + slot * 576
        scale_ptr = page_ptr + (block_size * 576 + slot0 * 8) + slot * 8
        row_ptr = tl.multiple_of(
            out_ptr + pos0.to(tl.int64) * out_stride_row + slot.to(tl.int64) * out_stride_row, STORE_BYTES
        )

        # all loads first: the code that waits for one of them must not hold up the next
        mask = valid[:, None] & (group < 7)[None, :]
        words = _load_words(data_ptr[:, None, None], word[None, :, :], mask[:, :, None], LOAD_BYTES)
        tail_value = _load_tail(data_ptr[:, None] + 448, tail[None, :], valid[:, None], LOAD_BYTES)
        scale = ue8m0.decode(tl.load(scale_ptr[:, None] + group[None, :], mask=mask, other=0))

        even = tl.join(e4m3.decode_top_byte(words << 24), e4m3.decode_top_byte(words << 8))
        odd = tl.join(e4m3.decode_top_byte(words << 16), e4m3.decode_top_byte(words))
        value = tl.reshape(tl.join(even, odd), (ROWS, 8, 64)) * scale[:, :, None]
        tl.store(row_ptr[:, None, None] + code[None, :, :], value.to(tl.bfloat16), mask=mask[:, :, None])
        tl.store(row_ptr[:, None] + 448 + tail[None, :], tail_value, mask=valid[:, None])


@triton.jit
def _load_words(ptr, index, mask, UNIT: tl.constexpr):
    if UNIT >= 4:
        return tl.load(ptr.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)
    words = tl.load(ptr + index * 4, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        words |= tl.load(ptr + index * 4 + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
    return words


@triton.jit
def _load_tail(ptr, index, mask, UNIT: tl.constexpr):
    if UNIT >= 2:
        return tl.load(ptr.to(tl.pointer_type(tl.bfloat16)) + index, mask=mask, other=0.0)
    low = tl.load(ptr + index * 2, mask=mask, other=0).to(tl.uint16)
    high = tl.load(ptr + index * 2 + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.bfloat16, bitcast=True)


def _variant(name: str, rows: int, load_bytes: int, store_bytes: int, num_warps: int) -> Variant:
    return Variant(
        name=name,
        kernel=_gather_kernel,
        signature=_POINTERS | dict.fromkeys(_STRIDES, "i64") | dict.fromkeys(_SIZES, "i32"),
        constexprs={"ROWS": rows, "LOAD_BYTES": load_bytes, "STORE_BYTES": store_bytes},
        num_warps=num_warps,
    )


# every cache that vLLM allocates takes the first; the other serves any address and stride
WIDE = _variant("wide", rows=16, load_bytes=8, store_bytes=16, num_warps=4)
NARROW = _variant("narrow", rows=8, load_bytes=1, store_bytes=2, num_warps=4)

# programs per SM that the grid is capped at; each takes tile after tile
MAX_PROGRAMS_PER_SM = 32


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in (WIDE, NARROW) if arch in variant.archs)


def pick(out: torch.Tensor, k_cache: torch.Tensor) -> Variant:
    """The variant for these tensors' addresses and strides."""
    loads = k_cache.data_ptr() | k_cache.stride(0)
    stores = out.data_ptr() | 2 * out.stride(0) | 2 * out.stride(1)
    fits = loads % WIDE.constexprs["LOAD_BYTES"] == 0 and stores % WIDE.constexprs["STORE_BYTES"] == 0
    return WIDE if fits else NARROW


def launch(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    max_gather_len: int | None,
) -> None:
    """Launches the kernel on checked arguments; the grid is made from what the host knows, without a sync."""
    variant = pick(out, k_cache)
    num_reqs, capacity = seq_lens.shape[0], out.shape[1] - offset
    longest = capacity if max_gather_len is None else min(max_gather_len, capacity)
    # a gather that starts inside a page touches one page more; plain arithmetic, since `triton.cdiv` is slow on the host
    tiles = (-(-longest // block_size) + 1) * -(-block_size // variant.constexprs["ROWS"])
    workers = max(1, min(tiles, MAX_PROGRAMS_PER_SM * _sm_count() // num_reqs))
    _gather_kernel[(num_reqs * workers,)](
        out,
        k_cache,
        seq_lens,
        gather_lens,
        block_table,
        out.stride(0),
        out.stride(1),
        k_cache.stride(0),
        block_table.stride(0),
        block_size,
        offset,
        capacity,
        workers,
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )


def _sm_count() -> int:
    device = gate.device()
    return device.sm_count if device else gate.SM_COUNTS["sm80"]
