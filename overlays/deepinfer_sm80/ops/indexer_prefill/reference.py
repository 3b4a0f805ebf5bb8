"""The oracle of `indexer_prefill`."""

from __future__ import annotations

import torch

from ..indexer.reference import scores

# rows at a time: the dots of all heads are kept
_ROWS = 16


def indexer_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor,
    *,
    compressed: bool,
    bound: torch.Tensor | None = None,
) -> None:
    """The op's contract; `out` may be float64, and `bound`, of its shape, receives the bounds."""
    starts, ends = ks.tolist(), ke.tolist()
    for first in range(0, len(q), _ROWS):
        part = slice(first, first + _ROWS)
        logits, bounds = scores(q[part], k, k_scale, weights[part])
        for row in range(first, min(first + _ROWS, len(q))):
            begin = max(starts[row], 0)
            origin = begin if compressed else 0
            end = min(ends[row], len(k), origin + out.shape[1])
            if end > begin:
                columns = slice(begin - origin, end - origin)
                out[row, columns] = logits[row - first, begin:end].to(out.dtype)
                if bound is not None:
                    bound[row, columns] = bounds[row - first, begin:end]
