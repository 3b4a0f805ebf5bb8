"""Deliberately wrong implementations of `indexer_decode`, made from its oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepinfer_sm80.ops.indexer_decode import reference
from deepinfer_sm80.ops.indexer_decode.reference import indexer_decode as oracle

OP = "indexer_decode"


def _last_key_missing(**kwargs: Any) -> None:
    oracle(**{**kwargs, "context_lens": kwargs["context_lens"] - 1})


def _one_key_too_many(**kwargs: Any) -> None:
    oracle(**{**kwargs, "context_lens": kwargs["context_lens"] + 1})


def _one_length_for_all_tokens(**kwargs: Any) -> None:
    lens, next_n = kwargs["context_lens"], kwargs["q"].shape[1]
    last = (lens if lens.dim() == 2 else lens[:, None])[:, -1:]
    oracle(**{**kwargs, "context_lens": last.expand(-1, next_n)})


def _pages_in_order(**kwargs: Any) -> None:
    table = kwargs["block_table"]
    ordered = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view(table.shape)
    oracle(**{**kwargs, "block_table": ordered % len(kwargs["kv_cache"])})


def _table_of_another_request(**kwargs: Any) -> None:
    oracle(**{**kwargs, "block_table": kwargs["block_table"].roll(1, 0)})


def _weights_by_request(**kwargs: Any) -> None:
    next_n = kwargs["q"].shape[1]
    oracle(**{**kwargs, "weights": kwargs["weights"][::next_n].repeat_interleave(next_n, 0)})


def _tokens_swapped(**kwargs: Any) -> None:
    oracle(**{**kwargs, "q": kwargs["q"].flip(1)})


def _interleaved_records(**kwargs: Any) -> None:
    """A record's scale after its own codes."""

    def records(cache: torch.Tensor, pages: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        flat = cache[pages.long()].reshape(-1, 132)[:count]
        return flat[:, :128], flat[:, 128:].contiguous().view(torch.float32).reshape(-1).nan_to_num()

    _with_records(records, **kwargs)


def _scale_ignored(**kwargs: Any) -> None:
    real = reference._records
    _with_records(lambda *args: (real(*args)[0], torch.ones_like(real(*args)[1])), **kwargs)


def _scale_of_the_next(**kwargs: Any) -> None:
    real = reference._records
    _with_records(lambda *args: (real(*args)[0], real(*args)[1].roll(1)), **kwargs)


def _tail_is_minus_infinity(**kwargs: Any) -> None:
    kwargs["out"].fill_(float("-inf"))
    oracle(**kwargs)


def _with_records(records: Callable[..., Any], **kwargs: Any) -> None:
    """The oracle with another reader of pages."""
    real, reference._records = reference._records, records
    try:
        oracle(**kwargs)
    finally:
        reference._records = real


WRONG: dict[str, Callable[..., Any]] = {
    "last-key-missing": _last_key_missing,
    "one-key-too-many": _one_key_too_many,
    "one-length-for-all-tokens": _one_length_for_all_tokens,
    "pages-in-order": _pages_in_order,
    "table-of-another-request": _table_of_another_request,
    "weights-by-request": _weights_by_request,
    "tokens-swapped": _tokens_swapped,
    "interleaved-records": _interleaved_records,
    "scale-ignored": _scale_ignored,
    "scale-of-the-next": _scale_of_the_next,
    "tail-is-minus-infinity": _tail_is_minus_infinity,
}
