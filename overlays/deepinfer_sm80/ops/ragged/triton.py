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
    WHOLE: tl.constexpr,
):
    block = tl.program_id(0)
    table = (indices_ptr, lengths_ptr, stride, width, num_tokens, num_rows)
    if BEFORE == "none":
        tl.store(sums_ptr + block, tl.sum(_counts(table, block, COMPACT, ROWS, COLUMNS), axis=0))
    else:
        # every load comes before the first reduction: they wait for memory together
        earlier = _earlier(table, sums_ptr, block, BEFORE, ROWS, COLUMNS)
        row = block * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        value, kept = _entries(table, row, column, COMPACT)
        counts = tl.sum(kept.to(tl.int32), axis=1) if WHOLE else _counts(table, block, COMPACT, ROWS, COLUMNS)
        ends = tl.sum(earlier) + tl.cumsum(counts, axis=0)
        tl.store(indptr_ptr + 1 + row, ends, mask=row < num_tokens)
        tl.store(indptr_ptr + row, ends - counts, mask=row == 0)

        # entries go to the front in order, and what a row leaves free to the back, in the reverse order
        front = ends - counts
        free = num_tokens * width - 1 - (row * width - front)
        found = _place(flat_ptr, row, column, value, kept, front, free, 0, width, num_tokens)
        if not WHOLE:
            for first in range(COLUMNS, width, COLUMNS):
                front += found
                free += found
                value, kept = _entries(table, row, first + column, COMPACT)
                found = _place(flat_ptr, row, column, value, kept, front, free, first, width, num_tokens)


@triton.jit
def _place(flat_ptr, row, column, value, kept, front, free, first, width, num_tokens):
    """Stores a tile of rows, from column `first` on; returns how many entries each row has kept of it."""
    taken = kept.to(tl.int32)
    rank = tl.cumsum(taken, axis=1)
    to_front = front[:, None] + rank - 1
    to_back = free[:, None] - (first + column[None, :] - rank)
    inside = (row < num_tokens)[:, None] & (first + column < width)[None, :]
    tl.store(flat_ptr + tl.where(kept, to_front, to_back), tl.where(kept, value, -1), mask=inside)
    return tl.sum(taken, axis=1)


@triton.jit
def _earlier(table, sums_ptr, block, BEFORE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Parts of the number of entries of all rows before this block's: from the first launch's sums, or counted here."""
    lengths_ptr, width = table[1], table[3]
    if BEFORE == "rows":
        parts = tl.zeros((ROWS, COLUMNS), tl.int32)
        for other in range(0, block):
            row = other * ROWS + tl.arange(0, ROWS)
            for first in range(0, width, COLUMNS):
                _, kept = _entries(table, row, first + tl.arange(0, COLUMNS), True)
                parts += kept.to(tl.int32)
    else:
        parts = _parts(sums_ptr, lengths_ptr, 0, block, width, BEFORE, ROWS)
        for first in range(1024, block * ROWS if BEFORE == "lengths" else block, 1024):
            parts += _parts(sums_ptr, lengths_ptr, first, block, width, BEFORE, ROWS)
    return parts


@triton.jit
def _parts(sums_ptr, lengths_ptr, first, block, width, BEFORE: tl.constexpr, ROWS: tl.constexpr):
    """1,024 sums of blocks, or lengths of rows, of those before this block."""
    other = first + tl.arange(0, 1024)
    if BEFORE == "sums":
        parts = tl.load(sums_ptr + other, mask=other < block, other=0)
    else:
        length = tl.load(lengths_ptr + other, mask=other < block * ROWS, other=0)
        parts = tl.minimum(tl.maximum(length, 0), width)
    return parts


@triton.jit
def _counts(table, block, COMPACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Entries that each row of a block keeps."""
    lengths_ptr, width, num_tokens = table[1], table[3], table[4]
    row = block * ROWS + tl.arange(0, ROWS)
    if COMPACT:
        counts = tl.zeros((ROWS,), tl.int32)
        for first in range(0, width, COLUMNS):
            _, kept = _entries(table, row, first + tl.arange(0, COLUMNS), COMPACT)
            counts += tl.sum(kept.to(tl.int32), axis=1)
    else:
        length = tl.load(lengths_ptr + row, mask=row < num_tokens, other=0)
        counts = tl.minimum(tl.maximum(length, 0), width)
    return counts


@triton.jit
def _entries(table, row, column, COMPACT: tl.constexpr):
    """The entries of some rows and columns, and which of them take a place."""
    indices_ptr, lengths_ptr, stride, width, num_tokens, num_rows = table
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


def _family(name: str, rows: int, columns: int, num_warps: int, whole: bool = True) -> dict[str, Variant]:
    """The variants for rows of some width, by how a program learns where its rows start."""

    def variant(kind: str, compact: bool, before: str) -> Variant:
        tile = {"ROWS": rows, "COLUMNS": columns, "WHOLE": whole}
        return Variant(
            name=f"{name}-{kind}",
            kernel=_ragged_kernel,
            signature=dict.fromkeys(_POINTERS, "*i32") | {"stride": "i64"} | dict.fromkeys(_SIZES, "i32"),
            constexprs={"COMPACT": compact, "BEFORE": before, **tile},
            num_warps=num_warps,
            measured=MEASURED[columns],
        )

    return {
        "lengths": variant("prefixes", False, "lengths"),
        "rows": variant("compact", True, "rows"),
        "none": variant("count", True, "none"),
        "sums": variant("counted", True, "sums"),
    }


# tile width → graph replays on an H200 in sm80 code, of the tile sizes tried and of stock 0.33.0 (rows x width: us). The
# sizes were chosen with an earlier kernel, whose second launch read each row twice and reduced the sums block by block
MEASURED = {
    128: "96x128 5.5, stock 6.7 to 6.8. Earlier kernel, 4x128, 4 warps: one launch 1x128 2.4, 6x128 3.5, 24x128 7.5; "
    "two 24x128 5.1, 96x128 5.2, 512x128 5.7, 1536x128 7.0; stock 5.0, 5.2, 5.6, 5.4, 6.0, 7.8. 8 rows a program: "
    "1536x128 9.0",
    1024: "not measured. Earlier kernel, 1x1024, 4 warps, two launches: 96x640 6.2, 2048x640 16.6; stock 6.7, 14.5. "
    "2 rows a program: 7.9, 19.7",
}
# widest row → its variants; wider rows loop in the last
_TABLE = {128: _family("128", 4, 128, 4), 1024: _family("1024", 1, 1024, 4)}
_WIDER = _family("wider", 1, 1024, 4, whole=False)

# a compacting call of at most so many entries is one launch, whose programs count the rows before theirs anew
RECOUNTED_ENTRIES = 1024


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    families = (*_TABLE.values(), _WIDER)
    return tuple(variant for family in families for variant in family.values() if arch in variant.archs)


def pick(indices: torch.Tensor, compact: bool) -> tuple[Variant, ...]:
    """The variants to launch for these rows, in order."""
    family = next((family for widest, family in _TABLE.items() if indices.shape[1] <= widest), _WIDER)
    if not compact:
        return (family["lengths"],)
    alone = indices.shape[0] <= family["rows"].constexprs["ROWS"]
    if alone or indices.numel() <= RECOUNTED_ENTRIES:
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
