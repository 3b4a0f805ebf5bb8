"""Deliberately wrong implementations of `indexer_prefill`, made from its oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepinfer_sm80.ops.indexer import reference as shared
from deepinfer_sm80.ops.indexer_prefill.reference import indexer_prefill as oracle

OP = "indexer_prefill"


def _last_key_missing(**kwargs: Any) -> None:
    oracle(**{**kwargs, "ke": kwargs["ke"] - 1})


def _one_key_too_many(**kwargs: Any) -> None:
    oracle(**{**kwargs, "ke": kwargs["ke"] + 1})


def _first_key_missing(**kwargs: Any) -> None:
    oracle(**{**kwargs, "ks": kwargs["ks"] + 1})


def _other_contract(**kwargs: Any) -> None:
    oracle(**{**kwargs, "compressed": not kwargs["compressed"]})


def _key_scale_ignored(**kwargs: Any) -> None:
    oracle(**{**kwargs, "k_scale": torch.ones_like(kwargs["k_scale"])})


def _key_scale_of_the_next(**kwargs: Any) -> None:
    oracle(**{**kwargs, "k_scale": kwargs["k_scale"].roll(1)})


def _weights_ignored(**kwargs: Any) -> None:
    oracle(**{**kwargs, "weights": torch.ones_like(kwargs["weights"])})


def _heads_swapped(**kwargs: Any) -> None:
    oracle(**{**kwargs, "weights": kwargs["weights"].roll(16, 1)})


def _last_head_missing(**kwargs: Any) -> None:
    weights = kwargs["weights"].clone()
    weights[:, 31] = 0
    oracle(**{**kwargs, "weights": weights})


def _last_dim_missing(**kwargs: Any) -> None:
    q = kwargs["q"].view(torch.uint8).clone()
    q[..., 127] = 0
    oracle(**{**kwargs, "q": q})


def _subnormals_flushed(**kwargs: Any) -> None:
    k = kwargs["k"].view(torch.uint8)
    oracle(**{**kwargs, "k": torch.where(k & 0x78 == 0, k & 0x80, k)})


def _token_of_the_next_row(**kwargs: Any) -> None:
    oracle(**{**kwargs, "q": kwargs["q"].roll(1, 0)})


def _no_relu(**kwargs: Any) -> None:
    _patched(lambda dots: dots, **kwargs)


def _relu_after_the_sum(**kwargs: Any) -> None:
    out = kwargs["out"]
    _patched(lambda dots: dots, **kwargs)
    out.clamp_(min=0.0)


def _unwritten_is_minus_infinity(**kwargs: Any) -> None:
    kwargs["out"].fill_(float("-inf"))
    oracle(**kwargs)


def _three_bits_of_k(**kwargs: Any) -> None:
    oracle(**{**kwargs, "k": kwargs["k"].view(torch.uint8) & 0xFE})


def _e5m2(**kwargs: Any) -> None:
    table = shared.values
    shared.values = lambda codes: codes.view(torch.float8_e5m2).double().nan_to_num()
    try:
        oracle(**kwargs)
    finally:
        shared.values = table


def _patched(relu: Callable[[torch.Tensor], torch.Tensor], **kwargs: Any) -> None:
    """The oracle with another function in relu's place."""
    clamp = torch.Tensor.clamp
    torch.Tensor.clamp = lambda self, *args, **more: (
        relu(self) if more == {"min": 0.0} else clamp(self, *args, **more)
    )  # type: ignore[method-assign]
    try:
        oracle(**kwargs)
    finally:
        torch.Tensor.clamp = clamp  # type: ignore[method-assign]


WRONG: dict[str, Callable[..., Any]] = {
    "last-key-missing": _last_key_missing,
    "one-key-too-many": _one_key_too_many,
    "first-key-missing": _first_key_missing,
    "other-contract": _other_contract,
    "key-scale-ignored": _key_scale_ignored,
    "key-scale-of-the-next": _key_scale_of_the_next,
    "weights-ignored": _weights_ignored,
    "heads-swapped": _heads_swapped,
    "last-head-missing": _last_head_missing,
    "last-dim-missing": _last_dim_missing,
    "subnormals-flushed": _subnormals_flushed,
    "token-of-the-next-row": _token_of_the_next_row,
    "no-relu": _no_relu,
    "relu-after-the-sum": _relu_after_the_sum,
    "unwritten-is-minus-infinity": _unwritten_is_minus_infinity,
    "three-bits-of-k": _three_bits_of_k,
    "e5m2": _e5m2,
}
