"""The oracle of `indexer_decode`."""

from __future__ import annotations

import torch

from ..indexer import HEAD_DIM
from ..indexer.reference import scores


def indexer_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    bound: torch.Tensor | None = None,
) -> None:
    """The op's contract; `out` may be float64, and `bound`, of its shape, receives the bounds."""
    next_n = q.shape[1]
    for request in range(len(q)):
        lens = context_lens[request].reshape(-1).tolist()
        # one length is the last token's
        lens = lens if len(lens) == next_n else [lens[0] - (next_n - 1 - token) for token in range(next_n)]
        limit = min(out.shape[1], block_table.shape[1] * kv_cache.shape[1])
        lens = [min(one, limit) for one in lens]
        codes, scales = _records(kv_cache, block_table[request], max([*lens, 0]))
        for token, length in enumerate(lens):
            row = request * next_n + token
            if length > 0:
                found = scores(q[request, token, None], codes[:length], scales[:length], weights[row, None])
                out[row, :length] = found[0][0].to(out.dtype)
                if bound is not None:
                    bound[row, :length] = found[1][0]


def _records(kv_cache: torch.Tensor, pages: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` codes and scales of a request."""
    block_size = kv_cache.shape[1]
    used = pages[: -(-count // block_size)].long()
    flat = torch.as_strided(
        kv_cache, (kv_cache.shape[0], block_size * 132), (kv_cache.stride(0), 1), kv_cache.storage_offset()
    )[used]
    codes = flat[:, : block_size * HEAD_DIM].reshape(-1, HEAD_DIM)
    scales = flat[:, block_size * HEAD_DIM :].contiguous().view(torch.float32).reshape(-1)
    return codes[:count], scales[:count]
