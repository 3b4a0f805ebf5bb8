"""Oracle of `engram`, written from the table's format in plain PyTorch: products in float64, rounded once."""

from __future__ import annotations

import torch

from ...numerics import e4m3, ue8m0
from ..gather.reference import round_to_bf16


def engram(
    out: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    head_start: int,
    vocab_start: int,
    vocab_end: int,
    peers: torch.Tensor | None = None,
    peer_rows: int = 0,
    background: bool = False,
) -> None:
    """As `deepinfer_sm80.ops.engram.engram`, but `weight` and `scales` are the whole table even with `peers`."""
    codes, exponents = weight.view(torch.uint8), scales
    for head in range(out.shape[1]):
        column = head_start + head
        out[:, head] = 0
        if column >= ids.shape[1]:
            continue
        rows = ids[:, column].long()
        known = ((rows >= vocab_start) & (rows < vocab_end)).nonzero().flatten()
        rows = rows[known] - vocab_start
        out[known, head] = dequantize(codes[rows], exponents[rows])


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes `[n, dim]` with their scales `[n, dim / 32]`, both uint8, as bfloat16."""
    values = torch.tensor(e4m3.reference_values(), dtype=torch.float64, device=codes.device)[codes.long()]
    factors = torch.tensor(ue8m0.reference_values(), dtype=torch.float64, device=codes.device)[scales.long()]
    return round_to_bf16(values * factors.repeat_interleave(32, dim=1))
