"""Oracle of `indexer_k`, written from the contract in plain PyTorch."""

from __future__ import annotations

import torch

from ..rope_quant import reference as parts


def indexer_k(
    k_pre: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """As `deepinfer_sm80.ops.indexer_k.indexer_k`; works on CPU and GPU."""
    tokens, turned_at = parts.groups_that_end(positions, slot_mapping, compress_ratio)
    keys = normalized(k_pre[tokens], norm_weight, norm_eps)
    cos, sin = cos_sin_cache[turned_at].split(32, dim=1)
    cos, sin = torch.cat([torch.ones_like(cos), cos], dim=1), torch.cat([torch.zeros_like(sin), sin], dim=1)
    keys = parts.rotate(keys.float(), cos, sin).bfloat16()
    exponents = parts.scale_exponents(keys)
    codes = parts.encode(keys, exponents)
    scales = parts.power_of_two(exponents).float()

    pool, block_size, slots = parts.pool_of(k_cache), k_cache.shape[1], slot_mapping[tokens]
    page, row = slots // block_size * k_cache.stride(0), slots % block_size
    pool[(page + row * 128)[:, None] + torch.arange(128, device=pool.device)] = codes
    place = (page + block_size * 128 + row * 4)[:, None] + torch.arange(4, device=pool.device)
    pool[place] = scales[:, None].view(torch.uint8)


def normalized(keys: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """bf16 RMS norm of `[n, 128]`: sums and the root in float64, the rest in float32 step by step."""
    mean = keys.double().square().mean(dim=1).float()
    root = (1 / (mean + torch.tensor(eps, dtype=torch.float32)).double().sqrt()).float()
    return (keys.float() * root[:, None] * weight.float()).bfloat16()
