"""Oracle of `kv_insert`, written from the record format in plain PyTorch."""

from __future__ import annotations

import torch

from ..rope_quant import reference as parts


def kv_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """As `deepinfer_sm80.ops.kv_insert.kv_insert`; works on CPU and GPU."""
    tokens, turned_at = parts.groups_that_end(positions, slot_mapping, compress_ratio)
    slots, states = slot_mapping[tokens], latent[tokens]
    groups = states[:, :448].unflatten(1, (7, 64))
    exponents = parts.scale_exponents(groups)
    codes = parts.encode(groups, exponents).flatten(1)
    cos, sin = cos_sin_cache[turned_at].split(32, dim=1)
    tail = parts.rotate(states[:, 448:].float(), cos, sin).bfloat16()
    data = torch.cat([codes, tail.view(torch.uint8)], dim=1)
    scales = torch.cat([exponents + 127, torch.zeros_like(exponents[:, :1])], dim=1).to(torch.uint8)

    pool, block_size = parts.pool_of(kv_cache), kv_cache.shape[1]
    page, row = slots // block_size * kv_cache.stride(0), slots % block_size
    pool[(page + row * 576)[:, None] + torch.arange(576, device=pool.device)] = data
    pool[(page + block_size * 576 + row * 8)[:, None] + torch.arange(8, device=pool.device)] = scales
