"""Inputs that both indexer ops take, and how their outputs are compared."""

from __future__ import annotations

from typing import Any

import torch

from ..spec import SparseTolerance
from . import HEAD_DIM, HEADS

# fills the output: what is not written stays NaN
SENTINEL = float("nan")
# An element may be off by 2^-16 of what its products add up to without their signs. Over all elements
# 1 - 2xy / (x^2 + y^2) is half the square of the relative difference: 1e-9 stands for 4.5e-5, where 1e-3 is asked for.
TOLERANCE = SparseTolerance(factor=2.0**-16, floor=1e-30, cosine=1e-9, dtype="float32")


def codes(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> torch.Tensor:
    """uint8 e4m3 codes: `usual` (a quantised normal), `all`, `zero`, `subnormal`, or `large` (448 and -448)."""
    if kind == "usual":
        value = torch.randn(shape, generator=generator) * 100
        return value.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if kind == "zero":
        return torch.zeros(shape, dtype=torch.uint8)
    found = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return {"large": found & 0x80 | 0x7E, "subnormal": found & 0x87}.get(kind, found)


def scales(count: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    """float32 scales of keys: powers of two, as stock's writer makes them, or any positive float (`any`)."""
    exponents = torch.randint(-14, -3, (count,), generator=generator).float()
    return torch.exp2(exponents + (torch.rand(count, generator=generator) if kind == "any" else 0.0))


def queries(
    rows: int, kind: str, generator: torch.Generator, *, spare: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[rows, 32, 128]` and weights `[rows, 32]` of both signs; rows are `spare` elements apart (a multiple of 16)."""
    wide = codes((rows, HEADS * HEAD_DIM + spare), kind, generator)
    q = wide[:, : HEADS * HEAD_DIM].unflatten(1, (HEADS, HEAD_DIM))
    weights = torch.randn((rows, HEADS + spare), generator=generator) * 2.0**-9
    return q, weights[:, :HEADS]


def output(rows: int, width: int, params: Any, device: str | torch.device) -> torch.Tensor:
    """An output of sentinels; `out_stride` puts its rows apart."""
    stride = max(params.get("out_stride", width), width)
    return torch.full((rows * stride,), SENTINEL, device=device).view(rows, stride)[:, :width]


def whole(out: torch.Tensor) -> torch.Tensor:
    """`out` with the gaps between its rows."""
    width = out.stride(0) if out.numel() else out.shape[1]
    return torch.as_strided(out, (out.shape[0], width), out.stride(), out.storage_offset())


def oracle(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the oracle writes into, float64: the output and the bounds, each whole and as the part that `out` is."""
    shape = tuple(whole(out).shape)
    logits = torch.full(shape, SENTINEL, dtype=torch.float64, device=out.device)
    bounds = torch.zeros(shape, dtype=torch.float64, device=out.device)
    return logits, bounds, logits[:, : out.shape[1]], bounds[:, : out.shape[1]]
