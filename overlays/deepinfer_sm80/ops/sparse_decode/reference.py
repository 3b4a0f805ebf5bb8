"""Oracle of `sparse_decode`, written from the contract in plain PyTorch: token by token, in float64."""

from __future__ import annotations

from typing import Any

import torch

from ..gather.reference import dequantize
from ..sparse_prefill.reference import softmax


def attend(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_indices: torch.Tensor,
    swa_indptr: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    *,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_indptr: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact output and what its error is measured against; works on CPU and GPU.

    Args:
        q and all others: as of `deepinfer_sm80.ops.sparse_decode.sparse_decode`.

    Returns:
        float64 `[T, H, 512]` twice: the output, not rounded, and `|output| + sum_i p_i * |kv[slot_i]|`. Where the output
        is rotated, the sum is too: errors of a pair's two elements add up by the size of their sine and cosine.
    """
    lists = [(swa_cache, swa_indices, swa_indptr.tolist())]
    if extra_cache is not None and extra_indices is not None and extra_indptr is not None:
        lists.append((extra_cache, extra_indices, extra_indptr.tolist()))
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    spread = torch.zeros_like(out)
    for token in range(q.shape[0]):
        parts = [rows(cache, indices[indptr[token] : indptr[token + 1]]) for cache, indices, indptr in lists]
        kv = torch.cat(parts)
        if len(kv):
            weights = softmax(q[token].double() @ kv.T * scale, sink)
            out[token], spread[token] = weights @ kv, weights @ kv.abs()
    if positions is not None and cos_sin_cache is not None:
        table = cos_sin_cache[positions].double()[:, None]
        cos, sin = table[..., :32], table[..., 32:]
        rotate(out, cos, -sin)
        rotate(spread, cos.abs(), sin.abs(), mirror=1)
    return out, out.abs() + spread


def sparse_decode(q: torch.Tensor, out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """As `deepinfer_sm80.ops.sparse_decode.sparse_decode`: the exact output, rounded to bfloat16."""
    exact, _bound = attend(q, *args, **kwargs)
    # through float32: it rounds twice, which is a thousandth of what the tolerance allows
    out.copy_(exact.float())


def rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The records at the valid slots of a list as float64 `[n, 512]`, NaN as 0."""
    block_size = cache.shape[1]
    slots = slots[(slots >= 0) & (slots < cache.shape[0] * block_size)].long()
    values = dequantize(cache, slots // block_size, slots % block_size, block_size).double()
    return torch.where(values.isnan(), 0.0, values)


def rotate(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mirror: int = -1) -> None:
    """Turns the pairs (448 + 2k, 449 + 2k) of the last dim by the angle of (cos, sin), in place.

    Args:
        values: float64 `[T, H, 512]`.
        cos, sin: float64 `[T, 1, 32]`.
        mirror: -1, or 1 for what adds up whatever its sign.
    """
    even, odd = values[..., 448::2].clone(), values[..., 449::2].clone()
    values[..., 448::2] = even * cos + mirror * odd * sin
    values[..., 449::2] = odd * cos + even * sin
