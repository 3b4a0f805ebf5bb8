"""The kernel of `build_ragged`, its launches, and the table of its variants."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..spec import Variant

_POINTERS = ("flat_ptr", "indptr_ptr", "sums_ptr", "indices_ptr", "lengths_ptr")
_SIZES = ("width", "num_tokens", "num_rows")


@triton.jit(do_not_specialize=["stride", *_SIZES], do_not_specialize_on_alignment=list(_POINTERS))
def _ragged_kernel(
    flat_ptr,
    indptr_ptr,
    sums_ptr,
    indices_ptr,
    lengths_ptr,
    stride: tl.int64,
    width: tl.int32,
    num_tokens: tl.int32,
    num_rows: tl.int32,
    COMPACT: tl.constexpr,
    BEFORE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)
    counts = _counts(
        indices_ptr, lengths_ptr, block, stride, width, num_tokens, num_rows, COMPACT, ROWS, COLUMNS
    )
    if BEFORE == "none":
        tl.store(sums_ptr + block, tl.sum(counts, axis=0))
    else:
        before = _before(
            sums_ptr,
            indices_ptr,
            lengths_ptr,
            block,
            stride,
            width,
            num_tokens,
            num_rows,
            BEFORE,
            ROWS,
            COLUMNS,
        )
        row = block * ROWS + tl.arange(0, ROWS)
        ends = before + tl.cumsum(counts, axis=0)
        tl.store(indptr_ptr + 1 + row, ends, mask=row < num_tokens)
        tl.store(indptr_ptr + row, ends - counts, mask=row == 0)

        # entries go to the front in order, and what a row leaves free to the back, in the reverse order
        free = num_tokens * width - 1 - (row * width - (ends - counts))
        front = ends - counts
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            value, kept = _entries(
                indices_ptr, lengths_ptr, row, column, stride, width, num_tokens, num_rows, COMPACT
            )
            rank = tl.cumsum(kept.to(tl.int32), axis=1)
            to_front = front[:, None] + rank - 1
            to_back = free[:, None] - (column[None, :] - first - rank)
            inside = (row < num_tokens)[:, None] & (column < width)[None, :]
            tl.store(flat_ptr + tl.where(kept, to_front, to_back), tl.where(kept, value, -1), mask=inside)
            found = tl.sum(kept.to(tl.int32), axis=1)
            front += found
            free -= COLUMNS - found


@triton.jit
def _before(
    sums_ptr,
    indices_ptr,
    lengths_ptr,
    block,
    stride,
    width,
    num_tokens,
    num_rows,
    BEFORE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Entries of all rows before this block's: from the first launch's sums, or counted here once more."""
    total = 0
    if BEFORE == "sums":
        for first in range(0, block, 256):
            other = first + tl.arange(0, 256)
            total += tl.sum(tl.load(sums_ptr + other, mask=other < block, other=0), axis=0)
    elif BEFORE == "lengths":
        for first in range(0, block * ROWS, 256):
            other = first + tl.arange(0, 256)
            length = tl.load(lengths_ptr + other, mask=other < block * ROWS, other=0)
            total += tl.sum(tl.minimum(tl.maximum(length, 0), width), axis=0)
    else:
        for other in range(0, block):
            counts = _counts(
                indices_ptr, lengths_ptr, other, stride, width, num_tokens, num_rows, True, ROWS, COLUMNS
            )
            total += tl.sum(counts, axis=0)
    return total


@triton.jit
def _counts(
    indices_ptr,
    lengths_ptr,
    block,
    stride,
    width,
    num_tokens,
    num_rows,
    COMPACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Entries that each row of a block keeps."""
    row = block * ROWS + tl.arange(0, ROWS)
    if COMPACT:
        counts = tl.zeros((ROWS,), tl.int32)
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            _, kept = _entries(
                indices_ptr, lengths_ptr, row, column, stride, width, num_tokens, num_rows, COMPACT
            )
            counts += tl.sum(kept.to(tl.int32), axis=1)
    else:
        length = tl.load(lengths_ptr + row, mask=row < num_tokens, other=0)
        counts = tl.minimum(tl.maximum(length, 0), width)
    return counts


@triton.jit
def _entries(
    indices_ptr, lengths_ptr, row, column, stride, width, num_tokens, num_rows, COMPACT: tl.constexpr
):
    """The entries of some rows and columns, and which of them take a place."""
    length = tl.load(lengths_ptr + row, mask=row < num_tokens, other=0)
    inside = (column[None, :] < tl.minimum(length, width)[:, None]) & (row < num_tokens)[:, None]
    # a row is a whole number of entries away, columns are next to each other
    value = tl.load(indices_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=-1)
    valid = (value >= 0) & ((num_rows < 0) | (value < num_rows))
    if COMPACT:
        kept = inside & valid
    else:
        kept = inside
        value = tl.where((num_rows < 0) | valid, value, -1)
    return value, kept


def _variant(name: str, compact: bool, before: str, rows: int, columns: int, num_warps: int) -> Variant:
    return Variant(
        name=name,
        kernel=_ragged_kernel,
        signature=dict.fromkeys(_POINTERS, "*i32") | {"stride": "i64"} | dict.fromkeys(_SIZES, "i32"),
        constexprs={"COMPACT": compact, "BEFORE": before, "ROWS": rows, "COLUMNS": columns},
        num_warps=num_warps,
    )


def _family(name: str, rows: int, columns: int, num_warps: int) -> dict[str, Variant]:
    """The variants for rows of some width, by how a program learns where its rows start."""
    tile = (rows, columns, num_warps)
    return {
        "lengths": _variant(f"{name}-prefixes", False, "lengths", *tile),
        "rows": _variant(f"{name}-compact", True, "rows", *tile),
        "none": _variant(f"{name}-count", True, "none", *tile),
        "sums": _variant(f"{name}-counted", True, "sums", *tile),
    }


# widest row → its variants; wider rows loop in the last
_TABLE = {128: _family("128", 8, 128, 4), 1024: _family("1024", 2, 1024, 4)}

# a compacting call of at most so many entries is one launch, whose programs count the rows before theirs anew
RECOUNTED_ENTRIES = 32_768


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(
        variant for family in _TABLE.values() for variant in family.values() if arch in variant.archs
    )


def pick(indices: torch.Tensor, compact: bool) -> tuple[Variant, ...]:
    """The variants to launch for these rows, in order."""
    family = next((family for widest, family in _TABLE.items() if indices.shape[1] <= widest), _TABLE[1024])
    if not compact:
        return (family["lengths"],)
    if indices.numel() <= RECOUNTED_ENTRIES:
        return (family["rows"],)
    return family["none"], family["sums"]


def launch(
    flat: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    *,
    num_rows: int,
    compact: bool,
) -> None:
    """Launches the kernel on checked arguments, a program for every few rows; there is at least one row."""
    chosen = pick(indices, compact)
    blocks = -(-indices.shape[0] // chosen[0].constexprs["ROWS"])
    # a single launch neither writes nor reads sums
    sums = torch.empty(blocks, dtype=torch.int32, device=indices.device) if len(chosen) > 1 else indptr
    for variant in chosen:
        _ragged_kernel[(blocks,)](
            flat,
            indptr,
            sums,
            indices,
            lengths,
            indices.stride(0),
            indices.shape[1],
            indices.shape[0],
            num_rows,
            **variant.constexprs,
            num_warps=variant.num_warps,
            num_stages=variant.num_stages,
        )
