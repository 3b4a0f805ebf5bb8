"""Packs a dense table of indices, a row per token, into the ragged form that sparse attention reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def build_ragged(
    indices: torch.Tensor, lengths: torch.Tensor, num_rows: int = -1, *, compact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `lengths[t]` entries of each row t, one row after the other.

    Args:
        indices: int32 `[T, ...]`, flattened to `[T, W]`; any row stride.
        lengths: int32 with T entries, in entries of the row; below 0 counts as 0 and above W as W.
        num_rows: rows of the table that the indices point into; -1 for a table of unknown size.
        compact: an entry that is negative or, where `num_rows` is known, not below it, takes no place (vLLM 0.32 and
            later). Otherwise it keeps its place: as -1 where `num_rows` is known, else as it is (0.30 and 0.31).

    Returns:
        `flat`, int32 `[T * W]`, and `indptr`, int32 `[T + 1]`: row t's entries are `flat[indptr[t]:indptr[t + 1]]`.
        Everything behind `flat[:indptr[T]]` is -1. Stock leaves that part undefined, and its decode builder copies it.

    Raises:
        ValueError: `lengths` has not one entry per row, or the table has 2^31 entries or more.

    Notes:
        One launch, or two for a compacting call of more than a few rows; stock makes three to five. No host sync,
        and no memory but the outputs and, for two launches, four bytes for every few rows.
    """
    import torch

    from .triton import launch

    if indices.dim() < 1:
        raise ValueError("indices must have a row per token, has no dims")
    num_tokens = indices.shape[0]
    rows = indices.reshape(num_tokens, -1) if indices.numel() else indices.new_empty((num_tokens, 0))
    if lengths.numel() != num_tokens:
        raise ValueError(f"{num_tokens} rows need as many lengths, got {lengths.numel()}")
    if rows.numel() >= 2**31:
        raise ValueError(f"indices has {rows.numel()} entries, indptr counts up to 2^31 - 1")
    flat = torch.empty(rows.numel(), dtype=torch.int32, device=indices.device)
    if num_tokens == 0:
        return flat, torch.zeros(1, dtype=torch.int32, device=indices.device)
    indptr = torch.empty(num_tokens + 1, dtype=torch.int32, device=indices.device)
    rows = rows.to(torch.int32)
    launch(
        flat,
        indptr,
        rows if rows.stride(1) == 1 else rows.contiguous(),
        lengths.to(device=indices.device, dtype=torch.int32).reshape(-1).contiguous(),
        num_rows=int(num_rows),
        compact=compact,
    )
    return flat, indptr


# the op by the name of its folder, as the harness asks for it
ragged = build_ragged
