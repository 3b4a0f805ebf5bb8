"""The oracle of the indexer's score: PyTorch, float64, on the quantised bytes."""

from __future__ import annotations

import torch

from ...numerics import e4m3

# keys at a time, so that a context of a million fits
_CHUNK = 8192


def values(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 codes as float64; the two NaN codes are 480 and -480, as the ops' docstrings say."""
    table = torch.tensor(e4m3.reference_values(), dtype=torch.float64)
    table[0x7F], table[0xFF] = 480.0, -480.0
    return table.to(codes.device)[codes.view(torch.uint8).long()]


def scores(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row of q `[M, 32, 128]` against every key of k `[N, 128]`: the logits, float64 `[M, N]`, and their bounds.

    A bound is the logit with every product and weight made positive: what its rounding errors are measured by.
    """
    q64, w64 = values(q), weights.double()
    found = [
        _chunk(q64, w64, values(k[i : i + _CHUNK]), k_scale[i : i + _CHUNK]) for i in range(0, len(k), _CHUNK)
    ]
    if not found:
        empty = torch.empty((len(q), 0), dtype=torch.float64, device=q.device)
        return empty, empty
    logits, bounds = zip(*found, strict=True)
    return torch.cat(logits, dim=1), torch.cat(bounds, dim=1)


def _chunk(
    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = k_scale.double()
    dots = torch.einsum("mhd,nd->mhn", q, k).clamp(min=0.0)
    logits = torch.einsum("mhn,mh->mn", dots, weights) * scale
    sizes = torch.einsum("mhd,nd->mhn", q.abs(), k.abs())
    return logits, torch.einsum("mhn,mh->mn", sizes, weights.abs()) * scale.abs()
