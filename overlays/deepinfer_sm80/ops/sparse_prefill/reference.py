"""Oracle of `sparse_prefill`, written from the contract in plain PyTorch: token by token, in float64."""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    *,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact output and what its error is measured against; works on CPU and GPU.

    Args:
        q, kv, scale, sink, indices, lengths, indptr: as of `deepinfer_sm80.ops.sparse_prefill.sparse_prefill`.

    Returns:
        float64 `[T, H, 512]` twice: the output, not rounded, and `|output| + sum_i p_i * |kv[slot_i]|`.
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    bound = torch.zeros_like(out)
    for token, slots in enumerate(_slots(indices, lengths, indptr, q.shape[0])):
        valid = slots[(slots >= 0) & (slots < kv.shape[0])].long()
        if len(valid) == 0:
            continue
        rows = kv[valid].double()
        weights = softmax(q[token].double() @ rows.T * scale, sink)
        out[token] = weights @ rows
        bound[token] = out[token].abs() + weights @ rows.abs()
    return out, bound


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    *,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
) -> None:
    """As `deepinfer_sm80.ops.sparse_prefill.sparse_prefill`: the exact output, rounded to bfloat16."""
    exact, _bound = attend(q, kv, scale, sink, indices=indices, lengths=lengths, indptr=indptr)
    # through float32: it rounds twice, which is a thousandth of what the tolerance allows
    out.copy_(exact.float())


def _slots(
    indices: torch.Tensor, lengths: torch.Tensor | None, indptr: torch.Tensor | None, tokens: int
) -> list[torch.Tensor]:
    if indptr is not None:
        ends = indptr.tolist()
        return [indices[ends[token] : ends[token + 1]] for token in range(tokens)]
    assert lengths is not None
    return [indices[token, : max(0, length)] for token, length in enumerate(lengths.tolist()[:tokens])]


def softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Weights `[H, n]` of float64 scores `[H, n]`; the sink takes a share that no row gets."""
    if sink is None:
        return torch.softmax(scores, dim=1)
    column = sink[: scores.shape[0], None].double()
    return torch.softmax(torch.cat([scores, column], dim=1), dim=1)[:, :-1]
