"""Oracle of `combine`, written from the contract in plain Python integers: token by token."""

from __future__ import annotations

import torch


def combine(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    replay_clamp: bool,
    width_cap: bool,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `deepinfer_sm80.ops.combine.combine`; works on CPU tensors and on any device's through the CPU."""
    num_tokens, device = topk_indices.shape[0], topk_indices.device
    width = -(-(topk + window_size) // 128) * 128
    if out is None:
        out = (
            torch.empty((num_tokens, width), dtype=torch.int32, device=device),
            torch.empty(num_tokens, dtype=torch.int32, device=device),
        )
    indices = torch.full(out[0].shape, -1, dtype=torch.int64)
    lens = torch.zeros(num_tokens, dtype=torch.int32)
    rows = topk_indices.cpu().long().flatten(1)
    starts, seq_lens, gather_lens = query_start_loc.tolist(), seq_lens.tolist(), gather_lens.tolist()
    for request, (seq_len, gather_len) in enumerate(zip(seq_lens, gather_lens, strict=False)):
        first, last = starts[request] - starts[0], starts[request + 1] - starts[0]
        for token in range(first, min(last, num_tokens)):
            position = seq_len - (last - token)
            chosen = _topk_part(rows[token], position, compress_ratio, topk, M * request, N, width_cap)
            gather_start = seq_len - gather_len
            lowest = max(0, gather_start) if replay_clamp else 0
            window = torch.arange(max(position - window_size + 1, lowest), max(position, lowest - 1) + 1)
            entries = torch.cat([chosen, M * request + N + window - gather_start])
            indices[token, : len(entries)] = entries
            lens[token] = len(entries)
    # int32 wraps around where M * request does not fit, as it does on the GPU
    out[0].copy_(indices.to(torch.int32))
    out[1][:num_tokens].copy_(lens)
    return out


def _topk_part(
    row: torch.Tensor, position: int, ratio: int, topk: int, shift: int, bound: int, width_cap: bool
) -> torch.Tensor:
    count = max(min((position + 1) // ratio, topk), 0) if ratio else 0
    if width_cap:
        count = min(count, len(row))
    chosen = torch.full((count,), -1, dtype=torch.int64)
    chosen[: len(row)] = row[:count]
    return torch.where((chosen >= 0) & (chosen < bound), chosen + shift, -1)
