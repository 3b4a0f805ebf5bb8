"""Oracle of `indexer_q`, written from the contract in plain PyTorch."""

from __future__ import annotations

import torch

from ..rope_quant import reference as parts


def indexer_q(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `deepinfer_sm80.ops.indexer_q.indexer_q`; works on CPU and GPU."""
    cos, sin = cos_sin_cache[positions].split(32, dim=1)
    turned = parts.rotate(q[..., 64:].float(), cos[:, None], sin[:, None]).bfloat16()
    queries = torch.cat([q[..., :64], turned], dim=-1)
    exponents = parts.scale_exponents(queries)
    codes = parts.encode(queries, exponents).view(torch.float8_e4m3fn)
    # a product of bf16 and float32 is exact in float64
    factor = torch.tensor(scale, dtype=torch.float32, device=weights.device).double()
    folded = (weights.double() * factor).float()
    # 2^128, the scale of an infinity, is one itself
    return codes, folded * parts.power_of_two(exponents).float()
