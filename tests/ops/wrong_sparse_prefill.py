"""Deliberately wrong implementations of `sparse_prefill`, made from its oracle or from naive arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from deepinfer_sm80.ops.sparse_prefill import reference

OP = "sparse_prefill"
TILE = 32


def _slots(kwargs: dict[str, Any]) -> list[torch.Tensor]:
    indptr, lengths = kwargs.get("indptr"), kwargs.get("lengths")
    tokens = kwargs["q"].shape[0]
    return reference._slots(kwargs["indices"], lengths, indptr, tokens)


def _with_slots(kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The oracle on changed lists of slots."""
    lists = [change(slots) for slots in _slots(kwargs)]
    ends = torch.tensor([0, *(len(slots) for slots in lists)]).cumsum(0)
    flat = torch.cat([*lists, kwargs["indices"].flatten()[:0]])
    reference.sparse_prefill(**{**kwargs, "indices": flat, "lengths": None, "indptr": ends})


def _per_token(kwargs: dict[str, Any], attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """`attend(scores, rows)` for each token that has a valid slot, zeros for the others; float32 throughout."""
    kv, out = kwargs["kv"], kwargs["out"]
    out.zero_()
    for token, slots in enumerate(_slots(kwargs)):
        rows = kv[slots[(slots >= 0) & (slots < kv.shape[0])].long()].float()
        if len(rows):
            scores = kwargs["q"][token].float() @ rows.T * kwargs["scale"]
            out[token] = attend(scores, rows).to(out.dtype)


def _sink(kwargs: dict[str, Any]) -> torch.Tensor:
    sink, heads = kwargs["sink"], kwargs["q"].shape[1]
    return torch.full((heads,), -float("inf")) if sink is None else sink[:heads]


def _row_off_by_one(**kwargs: Any) -> None:
    _with_slots(kwargs, lambda slots: slots + 1)


def _scale_twice(**kwargs: Any) -> None:
    reference.sparse_prefill(**{**kwargs, "scale": kwargs["scale"] ** 2})


def _missing_mask(**kwargs: Any) -> None:
    # a list is read to the end of its tile
    indices = kwargs["indices"]
    if kwargs.get("lengths") is not None:
        reference.sparse_prefill(**{**kwargs, "lengths": (kwargs["lengths"] + TILE - 1) // TILE * TILE})
        return
    ends = kwargs["indptr"].tolist()
    lists = [indices[begin : begin + -(-(end - begin) // TILE) * TILE] for begin, end in pairwise(ends)]
    starts = torch.tensor([0, *(len(slots) for slots in lists)]).cumsum(0)
    reference.sparse_prefill(**{**kwargs, "indices": torch.cat([*lists, indices[:0]]), "indptr": starts})


def _holes_kept(**kwargs: Any) -> None:
    last = kwargs["kv"].shape[0] - 1
    _with_slots(kwargs, lambda slots: slots.clamp(0, max(last, 0)))


def _missing_sink(**kwargs: Any) -> None:
    reference.sparse_prefill(**{**kwargs, "sink": None})


def _sink_in_numerator(**kwargs: Any) -> None:
    sink = _sink(kwargs)

    def attend(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(torch.cat([scores, sink[:, None]], dim=1), dim=1)
        return weights[:, :-1] @ rows + weights[:, -1:]

    _per_token(kwargs, attend)


def _sink_of_the_next_head(**kwargs: Any) -> None:
    sink = kwargs["sink"]
    heads = kwargs["q"].shape[1]
    reference.sparse_prefill(**{**kwargs, "sink": sink if sink is None else sink[:heads].roll(1)})


def _last_tile_dropped(**kwargs: Any) -> None:
    _with_slots(kwargs, lambda slots: slots[: len(slots) // TILE * TILE])


def _first_tile_wins(**kwargs: Any) -> None:
    _with_slots(kwargs, lambda slots: slots[:TILE])


def _maximum_not_rescaled(**kwargs: Any) -> None:
    sink = _sink(kwargs)

    def attend(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        top = sink.clamp(min=-1e30)
        total, sums = (sink - top).exp(), torch.zeros(len(sink), rows.shape[1])
        for first in range(0, scores.shape[1], TILE):
            part = scores[:, first : first + TILE]
            top = torch.maximum(top, part.amax(1))
            weights = (part - top[:, None]).exp()
            # the sums so far stay as they were under the lower maximum
            total, sums = total + weights.sum(1), sums + weights @ rows[first : first + TILE]
        return sums / total[:, None]

    _per_token(kwargs, attend)


def _weights_cut(**kwargs: Any) -> None:
    sink = _sink(kwargs)

    def attend(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        top = torch.maximum(scores.amax(1), sink)
        weights = (scores - top[:, None]).exp()
        total = weights.sum(1) + (sink - top).exp()
        # towards zero, as a cast that forgets to round
        cut = (weights.view(torch.int32) & ~0xFFFF).view(torch.float32)
        return cut @ rows / total[:, None]

    _per_token(kwargs, attend)


def _padding_counts(**kwargs: Any) -> None:
    sink = _sink(kwargs)

    def attend(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        # masked slots score 0 instead of -inf
        padding = torch.zeros(scores.shape[0], -scores.shape[1] % TILE)
        weights = torch.softmax(torch.cat([scores, padding, sink[:, None]], dim=1), dim=1)
        return weights[:, : len(rows)] @ rows

    _per_token(kwargs, attend)


def _tail_dims_left_out_of_scores(**kwargs: Any) -> None:
    q = kwargs["q"].clone()
    q[..., 448:] = 0
    reference.sparse_prefill(**{**kwargs, "q": q})


def _one_head_short(**kwargs: Any) -> None:
    out = kwargs["out"]
    before = out[:, -1].clone()
    reference.sparse_prefill(**kwargs)
    out[:, -1] = before


WRONG: dict[str, Callable[..., Any]] = {
    "row-off-by-one": _row_off_by_one,
    "scale-twice": _scale_twice,
    "missing-mask": _missing_mask,
    "holes-kept": _holes_kept,
    "missing-sink": _missing_sink,
    "sink-in-numerator": _sink_in_numerator,
    "sink-of-the-next-head": _sink_of_the_next_head,
    "last-tile-dropped": _last_tile_dropped,
    "first-tile-wins": _first_tile_wins,
    "maximum-not-rescaled": _maximum_not_rescaled,
    "weights-cut": _weights_cut,
    "padding-counts": _padding_counts,
    "tail-dims-left-out-of-scores": _tail_dims_left_out_of_scores,
    "one-head-short": _one_head_short,
}
