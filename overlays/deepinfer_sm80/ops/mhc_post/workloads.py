"""Workloads of `mhc_post`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..mhc import inputs as shared
from ..mhc.suites import POST_FULL, POST_SMOKE, cases_of
from ..spec import Case, Tolerance
from . import mhc_post, reference

OP = "mhc_post"
TOLERANCES = {"residual": Tolerance()}

_SMOKE = cases_of(
    OP,
    "smoke",
    POST_SMOKE,
    ("large", {"tokens": 5, "magnitude": 3e4}),
    ("small", {"tokens": 5, "magnitude": 1e-30}),
    ("flat-post-mix", {"tokens": 3, "flat": True}),
)
_FULL = cases_of(
    OP,
    "full",
    POST_FULL,
    ("hidden-7168", {"tokens": 9, "hidden": 7168}),
    ("hidden-8", {"tokens": 9, "hidden": 8}),
    ("many-rows", {"tokens": 70_001, "hidden": 64}),
    ("over-2^31-bytes", {"tokens": 60_000}),
)


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """Every number of tokens that is compared with stock."""
    return shared.bench_cases(OP)


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `mhc_post`, made from the case's seed; `out`, if any, is filled with NaN."""
    params = shared.params_of(case)
    inputs = shared.post_inputs(params, torch.Generator().manual_seed(case.seed), device)
    if params.get("flat"):
        inputs["post_layer_mix"] = inputs["post_layer_mix"].squeeze(-1)
    shape = inputs["residual"].shape
    return {**inputs, "out": shared.nan(device, torch.bfloat16, *shape) if params["out"] else None}


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's outputs, for inputs that no one has written to yet."""
    return {"residual": reference.mhc_post(**{**inputs, "out": None})}


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole outputs."""
    return {"residual": (function or mhc_post)(**inputs)}


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's function (every `style`)."""
    return shared.stock_kwargs(inputs)


def bytes_moved(case: Case) -> int:
    """Four streams and the sublayer's output in, four streams out, and the mixes."""
    params = shared.params_of(case)
    return 9 * shared.row_bytes(params) + shared.mix_bytes(params)


def flops(case: Case) -> int:
    """Five products and sums for each element of the new streams."""
    params = shared.params_of(case)
    return 20 * shared.row_bytes(params)
