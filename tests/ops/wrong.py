"""Deliberately wrong implementations, made from the oracles: a harness that passes one of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepinfer_sm80.ops.combine import reference as combine
from deepinfer_sm80.ops.gather import reference as gather


def _gather_off_by_one_row(**kwargs: Any) -> None:
    lens = kwargs["seq_lens"] if kwargs["gather_lens"] is None else kwargs["gather_lens"]
    shifted = torch.clamp(kwargs["seq_lens"] - 1, min=1)
    gather.gather(**{**kwargs, "seq_lens": shifted, "gather_lens": torch.minimum(lens, shifted)})


def _gather_scale_twice(**kwargs: Any) -> None:
    out, before = kwargs["out"], kwargs["out"].clone()
    gather.gather(**kwargs)
    written = out != before
    written[..., 448:] = False
    out[written] *= 2


def _gather_missing_mask(**kwargs: Any) -> None:
    lens = kwargs["seq_lens"] if kwargs["gather_lens"] is None else kwargs["gather_lens"]
    # one row too many: the slot after the last record
    gather.gather(**{**kwargs, "seq_lens": kwargs["seq_lens"] + 1, "gather_lens": lens + 1})


def _gather_scale_zero_flushed(**kwargs: Any) -> None:
    out, table = kwargs["out"], gather.ue8m0.reference_values
    gather.ue8m0.reference_values = lambda: [0.0, *table()[1:]]
    try:
        gather.gather(**{**kwargs, "out": out})
    finally:
        gather.ue8m0.reference_values = table


def _combine_off_by_one_row(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return combine.combine(**{**kwargs, "seq_lens": kwargs["seq_lens"] - 1})


def _combine_holes_kept(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    filled = torch.where(kwargs["topk_indices"] < 0, 0, kwargs["topk_indices"])
    return combine.combine(**{**kwargs, "topk_indices": filled})


def _combine_missing_padding(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    indices, lens = combine.combine(**{**kwargs, "out": None})
    if kwargs["out"] is None:
        kwargs["out"] = torch.zeros_like(indices), lens.clone()
    for row, length in enumerate(lens.tolist()):
        kwargs["out"][0][row, :length] = indices[row, :length]
    kwargs["out"][1][: len(lens)] = lens
    return kwargs["out"]


# op → name → function with the keyword contract of the op
WRONG: dict[str, dict[str, Callable[..., Any]]] = {
    "gather": {
        "off-by-one-row": _gather_off_by_one_row,
        "scale-twice": _gather_scale_twice,
        "missing-mask": _gather_missing_mask,
        "scale-zero-flushed": _gather_scale_zero_flushed,
    },
    "combine": {
        "off-by-one-row": _combine_off_by_one_row,
        "holes-kept": _combine_holes_kept,
        "missing-padding": _combine_missing_padding,
    },
}
