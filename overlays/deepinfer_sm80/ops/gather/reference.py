"""Oracle of `gather`, written from the record format in plain PyTorch: row by row, products in float64."""

from __future__ import annotations

import torch

from ...numerics import e4m3, ue8m0


def gather(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    max_gather_len: int | None = None,
) -> None:
    """As `deepinfer_sm80.ops.gather.gather`; works on CPU and GPU."""
    lens = seq_lens if gather_lens is None else gather_lens
    for request, (seq_len, gather_len) in enumerate(zip(seq_lens.tolist(), lens.tolist(), strict=False)):
        positions = torch.arange(seq_len - gather_len, seq_len, device=out.device)
        rows = offset + torch.arange(len(positions), device=out.device)
        kept = (positions >= 0) & (rows < out.shape[1])
        positions, rows = positions[kept], rows[kept]
        pages = block_table[request, positions // block_size].long()
        out[request, rows] = dequantize(k_cache, pages, positions % block_size, block_size)


def dequantize(
    k_cache: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, block_size: int
) -> torch.Tensor:
    """The records at (page, slot) as bfloat16 `[n, 512]`; `pages` and `slots` are int64 `[n]`."""
    pool = torch.as_strided(k_cache, (k_cache.untyped_storage().nbytes() - k_cache.storage_offset(),), (1,))
    page_start = pages * k_cache.stride(0)
    data = pool[page_start[:, None] + slots[:, None] * 576 + torch.arange(576, device=pool.device)]
    scale_start = page_start + block_size * 576 + slots * 8
    scales = pool[scale_start[:, None] + torch.arange(7, device=pool.device)]
    codes = data[:, :448].long()
    values = _table(e4m3.reference_values(), pool.device)[codes]
    factors = _table(ue8m0.reference_values(), pool.device)[scales.long()]
    product = values * factors.repeat_interleave(64, dim=1)
    tail = data[:, 448:].contiguous().view(torch.bfloat16)
    return torch.cat([round_to_bf16(product), tail], dim=1)


def round_to_bf16(value: torch.Tensor) -> torch.Tensor:
    """float64 to bfloat16 in one rounding: nearest even, subnormals kept, overflow to infinity.

    The usual way through float32 would round twice.
    """
    # eight significant bits, but nothing finer than the smallest subnormal
    exponent = torch.clamp(torch.frexp(value)[1] - 8, -133, 120).long()
    step = _table([2.0**power for power in range(-133, 121)], value.device)[exponent + 133]
    rounded = torch.where(torch.isfinite(value), torch.round(value / step) * step, value)
    return rounded.float().bfloat16()


def _table(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)
