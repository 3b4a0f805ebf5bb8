"""Workloads of `mhc_post_with_sqrsum`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..mhc import inputs as shared
from ..mhc.suites import POST_FULL, POST_SMOKE, called, cases_of
from ..spec import Case, Tolerance
from . import mhc_post_with_sqrsum, reference

OP = "mhc_post_with_sqrsum"
# The oracle's sum is rounded to float32, and so is the kernel's. From 2^14 on float32 steps by more than 1.9e-3, so
# there both must round to the same value.
TOLERANCES = {"residual": Tolerance(), "sqrsum": Tolerance(max_abs=1.9e-3)}

OUTPUTS = tuple(TOLERANCES)
_SMOKE = cases_of(
    OP,
    "smoke",
    POST_SMOKE,
    ("large", {"tokens": 5, "magnitude": 3e3}),
    ("small", {"tokens": 5, "magnitude": 1e-3}),
)
_FULL = cases_of(
    OP,
    "full",
    POST_FULL,
    *((f"hidden-{hidden}", {"tokens": 5, "hidden": hidden}) for hidden in (8, 1000, 6144, 8192)),
)


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """Every number of tokens at which `mhc_post` is timed; stock has no such op."""
    return shared.bench_cases(OP)


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of the op, made from the case's seed; `out`, if any, is filled with NaN."""
    params = shared.params_of(case)
    inputs = shared.post_inputs(params, torch.Generator().manual_seed(case.seed), device)
    out = None
    if params["out"]:
        new = shared.nan(device, torch.bfloat16, *inputs["residual"].shape)
        out = new, shared.nan(device, torch.float32, params["tokens"])
    return {**inputs, "out": out}


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's outputs, for inputs that no one has written to yet."""
    return called(OUTPUTS, reference.mhc_post_with_sqrsum, {**inputs, "out": None})


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole outputs."""
    return called(OUTPUTS, function or mhc_post_with_sqrsum, inputs)


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The call of stock's `mhc_post`, which does the larger part of it (every `style`)."""
    return shared.stock_kwargs(inputs)


def bytes_moved(case: Case) -> int:
    """Four streams and the sublayer's output in, four streams out, the mixes and the sums."""
    params = shared.params_of(case)
    return int(9 * shared.row_bytes(params) + shared.mix_bytes(params) + 4 * params["tokens"])


def flops(case: Case) -> int:
    """Five products and sums for each element of the new streams, and its square."""
    params = shared.params_of(case)
    return 24 * shared.row_bytes(params)
