"""The Engram lookup kernel, its launch, and the table of its variants."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import gate
from ...numerics import e4m3, ue8m0
from ..spec import Variant

_POINTERS = ("out_ptr", "ids_ptr", "table_ptr", "scales_ptr")
_STRIDES = ("out_stride_token", "out_stride_head", "ids_stride_token", "ids_stride_head")
_SIZES = ("num_rows", "heads", "all_heads", "head_start", "vocab_start", "vocab_end", "peer_rows", "dim")


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES], do_not_specialize_on_alignment=list(_POINTERS))
def _engram_kernel(
    out_ptr,
    ids_ptr,
    table_ptr,
    scales_ptr,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    ids_stride_token: tl.int64,
    ids_stride_head: tl.int64,
    num_rows: tl.int64,
    heads: tl.int32,
    all_heads: tl.int32,
    head_start: tl.int32,
    vocab_start: tl.int64,
    vocab_end: tl.int64,
    peer_rows: tl.int64,
    dim: tl.int32,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    UNIT: tl.constexpr,
    PEER: tl.constexpr,
):
    # a row is (token, one of this rank's heads)
    for base in range(tl.program_id(0).to(tl.int64) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = base + tl.arange(0, ROWS)
        token, head = row // heads, row % heads
        column = head_start + head
        valid = row < num_rows
        asked = valid & (column < all_heads)
        ids = tl.load(ids_ptr + token * ids_stride_token + column * ids_stride_head, mask=asked, other=-1)
        ids = ids.to(tl.int64)
        owned = asked & (ids >= vocab_start) & (ids < vocab_end)
        local = tl.where(owned, ids - vocab_start, 0)
        if PEER:
            part_ptr = tl.load(table_ptr + local // peer_rows, mask=owned, other=0)
            local = local % peer_rows
            codes_ptr = part_ptr.to(tl.pointer_type(tl.uint8))
            row_scales_ptr = codes_ptr + peer_rows * dim + local * (dim // 32)
            codes_ptr += local * dim
        else:
            codes_ptr = table_ptr + local * dim
            row_scales_ptr = scales_ptr + local * (dim // 32)
        row_ptr = out_ptr + token * out_stride_token + head * out_stride_head
        codes_ptr = tl.multiple_of(codes_ptr, UNIT)
        row_ptr = tl.multiple_of(row_ptr, UNIT)
        if DIM > 0:
            _copy(row_ptr, codes_ptr, row_scales_ptr, owned, valid, 0, DIM, DIM)
        else:
            for first in range(0, dim, 128):
                _copy(row_ptr, codes_ptr, row_scales_ptr, owned, valid, first, dim, 128)


@triton.jit
def _copy(row_ptr, codes_ptr, scales_ptr, owned, valid, first, dim, WIDTH: tl.constexpr):
    """Elements `first` to `first + WIDTH` of each row, as far as `dim`."""
    group = first // 32 + tl.arange(0, WIDTH // 32)
    col = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    here = (group < dim // 32)[None, :, None]
    mask = owned[:, None, None] & here
    codes = tl.load(codes_ptr[:, None, None] + col[None, :, :], mask=mask, other=0)
    scale_mask = owned[:, None] & (group < dim // 32)[None, :]
    scale = ue8m0.decode(tl.load(scales_ptr[:, None] + group[None, :], mask=scale_mask, other=127))
    value = e4m3.decode(codes) * scale[:, :, None]
    tl.store(
        row_ptr[:, None, None] + col[None, :, :], value.to(tl.bfloat16), mask=valid[:, None, None] & here
    )


def _variant(name: str, dim: int, unit: int, peer: bool) -> Variant:
    table = "*i64" if peer else "*u8"
    wide = dict.fromkeys(("num_rows", "vocab_start", "vocab_end", "peer_rows"), "i64")
    return Variant(
        name=name,
        kernel=_engram_kernel,
        signature={"out_ptr": "*bf16", "ids_ptr": "*i32", "table_ptr": table, "scales_ptr": "*u8"}
        | dict.fromkeys(_STRIDES, "i64")
        | {size: wide.get(size, "i32") for size in _SIZES},
        constexprs={"ROWS": 16, "DIM": dim, "UNIT": unit, "PEER": peer},
        num_warps=4,
    )


# the model's rows are 256 wide and aligned; the others serve any width and address
_VARIANTS = {
    (wide, peer): _variant(f"{'wide' if wide else 'narrow'}{'-peer' if peer else ''}", *shape, peer)
    for wide, shape in ((True, (256, 16)), (False, (0, 1)))
    for peer in (False, True)
}


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in _VARIANTS.values() if arch in variant.archs)


def pick(out: torch.Tensor, weight: torch.Tensor, peers: torch.Tensor | None) -> Variant:
    """The variant for these tensors' width, addresses and strides; parts of other ranks start where stock puts them."""
    rows = out.data_ptr() | 2 * out.stride(0) | 2 * out.stride(1)
    # symmetric memory is aligned to far more than 16 bytes
    table = 0 if peers is not None else weight.data_ptr()
    wide = out.shape[2] == 256 and (rows | table) % 16 == 0
    return _VARIANTS[wide, peers is not None]


def launch(
    out: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    peers: torch.Tensor | None,
    place: tuple[int, int, int, int],
    background: bool,
) -> None:
    """Launches the kernel on checked arguments; `place` is head_start, vocab_start, vocab_end, peer_rows.

    A program for each SM at most, each taking tile after tile: every row is another page of a table that dwarfs the
    TLB's reach, so more programs only get in each other's way (as in stock).
    """
    variant = pick(out, weight, peers)
    head_start, vocab_start, vocab_end, peer_rows = place
    tokens, heads, dim = out.shape
    programs = _sm_count() // (2 if background else 1)
    tiles = -(-tokens * heads // variant.constexprs["ROWS"])
    _engram_kernel[(max(1, min(tiles, programs)),)](
        out,
        ids,
        weight if peers is None else peers,
        scales,
        out.stride(0),
        out.stride(1),
        ids.stride(0),
        ids.stride(1),
        tokens * heads,
        heads,
        ids.shape[1],
        head_start,
        vocab_start,
        vocab_end,
        peer_rows,
        dim,
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )


def _sm_count() -> int:
    device = gate.device()
    return device.sm_count if device else gate.SM_COUNTS["sm80"]
