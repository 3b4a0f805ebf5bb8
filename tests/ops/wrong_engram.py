"""Deliberately wrong lookups, made from the oracle."""

from __future__ import annotations

from typing import Any

import torch
from deepinfer_sm80.ops.engram import reference

OP = "engram"


def _off_by_one_row(**kwargs: Any) -> None:
    moved = torch.where(kwargs["ids"] > kwargs["vocab_start"], kwargs["ids"] - 1, kwargs["ids"])
    reference.engram(**{**kwargs, "ids": moved})


def _scale_ignored(**kwargs: Any) -> None:
    scales = kwargs["scales"].clone()
    scales[:, -1] = 127
    reference.engram(**{**kwargs, "scales": scales})


def _scale_of_the_block_before(**kwargs: Any) -> None:
    reference.engram(**{**kwargs, "scales": kwargs["scales"].roll(1, dims=1)})


def _scale_zero_flushed(**kwargs: Any) -> None:
    table = reference.ue8m0.reference_values
    reference.ue8m0.reference_values = lambda: [0.0, *table()[1:]]
    try:
        reference.engram(**kwargs)
    finally:
        reference.ue8m0.reference_values = table


def _missing_mask(**kwargs: Any) -> None:
    """Follows ids that are another rank's, into the nearest row."""
    kept = kwargs["ids"].clamp(kwargs["vocab_start"], kwargs["vocab_end"] - 1)
    reference.engram(**{**kwargs, "ids": kept})


def _foreign_left_as_it_was(**kwargs: Any) -> None:
    out, before = kwargs["out"], kwargs["out"].clone()
    reference.engram(**kwargs)
    out[(out == 0).all(-1)] = before[(out == 0).all(-1)]


def _heads_from_zero(**kwargs: Any) -> None:
    reference.engram(**{**kwargs, "head_start": 0})


def _range_not_subtracted(**kwargs: Any) -> None:
    rows = kwargs["vocab_end"] - kwargs["vocab_start"]
    shifted = kwargs["ids"] + kwargs["vocab_start"] % rows
    wrapped = torch.where(shifted >= kwargs["vocab_end"], shifted - rows, shifted)
    inside = (kwargs["ids"] >= kwargs["vocab_start"]) & (kwargs["ids"] < kwargs["vocab_end"])
    reference.engram(**{**kwargs, "ids": torch.where(inside, wrapped, kwargs["ids"])})


def _part_of_the_first_rank(**kwargs: Any) -> None:
    if kwargs["peers"] is not None:
        rows = kwargs["peer_rows"]
        kwargs["weight"] = kwargs["weight"][:rows].repeat(len(kwargs["peers"]), 1)
        kwargs["scales"] = kwargs["scales"][:rows].repeat(len(kwargs["peers"]), 1)
    reference.engram(**kwargs)


WRONG = {
    "off-by-one-row": _off_by_one_row,
    "scale-ignored": _scale_ignored,
    "scale-of-the-block-before": _scale_of_the_block_before,
    "scale-zero-flushed": _scale_zero_flushed,
    "missing-mask": _missing_mask,
    "foreign-left-as-it-was": _foreign_left_as_it_was,
    "heads-from-zero": _heads_from_zero,
    "range-not-subtracted": _range_not_subtracted,
    "part-of-the-first-rank": _part_of_the_first_rank,
}
