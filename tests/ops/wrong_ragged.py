"""Deliberately wrong implementations of `build_ragged`, made from its oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepinfer_sm80.ops.ragged import reference

Result = tuple[torch.Tensor, torch.Tensor]


def _off_by_one_row(**kwargs: Any) -> Result:
    flat, indptr = reference.build_ragged(**kwargs)
    return flat, torch.cat([indptr[1:], indptr[-1:]])


def _holes_kept(**kwargs: Any) -> Result:
    return reference.build_ragged(**{**kwargs, "compact": False})


def _holes_dropped(**kwargs: Any) -> Result:
    return reference.build_ragged(**{**kwargs, "compact": True})


def _table_size_ignored(**kwargs: Any) -> Result:
    return reference.build_ragged(**{**kwargs, "num_rows": -1})


def _table_one_row_longer(**kwargs: Any) -> Result:
    known = kwargs["num_rows"] >= 0
    return reference.build_ragged(**{**kwargs, "num_rows": kwargs["num_rows"] + known})


def _lengths_ignored(**kwargs: Any) -> Result:
    lengths = torch.full_like(
        kwargs["lengths"], kwargs["indices"].flatten(1).shape[1] if len(kwargs["indices"]) else 0
    )
    return reference.build_ragged(**{**kwargs, "lengths": lengths})


def _entries_of_a_row_reversed(**kwargs: Any) -> Result:
    flat, indptr = reference.build_ragged(**kwargs)
    for start, end in zip(indptr.tolist(), indptr.tolist()[1:], strict=False):
        flat[start:end] = flat[start:end].flip(0)
    return flat, indptr


def _rest_undefined(**kwargs: Any) -> Result:
    flat, indptr = reference.build_ragged(**kwargs)
    flat[indptr[-1] :] = 7
    return flat, indptr


WRONG: dict[str, dict[str, Callable[..., Any]]] = {
    "ragged": {
        "off-by-one-row": _off_by_one_row,
        "holes-kept": _holes_kept,
        "holes-dropped": _holes_dropped,
        "table-size-ignored": _table_size_ignored,
        "table-one-row-longer": _table_one_row_longer,
        "lengths-ignored": _lengths_ignored,
        "entries-reversed": _entries_of_a_row_reversed,
        "rest-undefined": _rest_undefined,
    }
}
