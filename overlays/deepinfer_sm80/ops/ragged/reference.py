"""Oracle of `build_ragged`, written from the contract in plain Python: entry by entry."""

from __future__ import annotations

import torch


def build_ragged(
    indices: torch.Tensor, lengths: torch.Tensor, num_rows: int = -1, *, compact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `deepinfer_sm80.ops.ragged.build_ragged`; works on any device's tensors through the CPU."""
    packed: list[int] = []
    starts = [0]
    for row, length in zip(indices.tolist(), lengths.flatten().tolist(), strict=True):
        entries = _flat(row)
        for entry in entries[: max(length, 0)]:
            valid = entry >= 0 and (num_rows < 0 or entry < num_rows)
            if valid or (not compact and num_rows < 0):
                packed.append(entry)
            elif not compact:
                packed.append(-1)
        starts.append(len(packed))
    packed += [-1] * (indices.numel() - len(packed))
    return (
        torch.tensor(packed, dtype=torch.int32, device=indices.device),
        torch.tensor(starts, dtype=torch.int32, device=indices.device),
    )


# by the name of the op's folder, as the harness asks for it
ragged = build_ragged


def _flat(row: object) -> list[int]:
    """A row of any number of dims as a list."""
    if not isinstance(row, list):
        return [row]  # type: ignore[list-item]
    return [entry for part in row for entry in _flat(part)]
