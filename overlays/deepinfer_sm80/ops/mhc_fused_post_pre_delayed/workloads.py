"""Workloads of `mhc_fused_post_pre_delayed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..mhc import inputs as shared
from ..mhc.coefficients import STREAMS
from ..mhc.suites import PRE_FULL, PRE_SMOKE, PRE_TOLERANCES, cases_of, further, ran, wanted
from ..spec import Case, Tolerance
from . import mhc_fused_post_pre_delayed, reference

OP = "mhc_fused_post_pre_delayed"
OUTPUTS = ("residual", *PRE_TOLERANCES, "aux")
# a seam, the difference that a smaller batch makes, is an output of some cases only
TOLERANCES = {"residual": Tolerance(), **PRE_TOLERANCES, "aux": Tolerance(), "seam": shared.SEAM}
_SMOKE = cases_of(
    OP,
    "smoke",
    PRE_SMOKE,
    ("no-tokens-aux", {"tokens": 0, "aux": True}),
    ("seven-tokens-aux", {"tokens": 7, "aux": True}),
    ("no-norm", {"tokens": 5, "norm": False, "aux": True}),
    ("nan-row", {"tokens": 6, "nan_rows": (2,), "zero_rows": (4,), "aux": True}),
    ("own-output", {"tokens": 3, "out": False, "aux": True}),
)
_FULL = cases_of(
    OP,
    "full",
    PRE_FULL,
    # stock's seam lies at 32
    ("31-tokens", {"tokens": 31}),
    ("32-tokens", {"tokens": 32}),
    ("1031-tokens-aux", {"tokens": 1031, "aux": True}),
)


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """Every number of tokens that is compared with stock."""
    return shared.bench_cases(OP)


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of the op, made from the case's seed; `out`, if any, is filled with NaN."""
    params = shared.params_of(case)
    generator = torch.Generator().manual_seed(case.seed)
    inputs = {
        **shared.post_inputs(params, generator, device),
        **shared.pre_inputs(params, generator, device),
        "capture_aux": params["aux"],
    }
    out = None
    if params["out"]:
        aux = shared.nan(device, torch.bfloat16, params["tokens"] if params["aux"] else 0, params["hidden"])
        new = shared.nan(device, torch.bfloat16, *inputs["residual"].shape)
        out = new, *shared.pre_outputs(params, device), aux
    return {**inputs, "out": out, **further(params)}


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's outputs, for inputs that no one has written to yet."""
    return wanted(OUTPUTS, reference.mhc_fused_post_pre_delayed, inputs)


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole outputs."""
    return ran(OUTPUTS, function or mhc_fused_post_pre_delayed, inputs)


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's function (every `style`)."""
    return shared.stock_kwargs(inputs)


def bytes_moved(case: Case) -> int:
    """Four streams and the sublayer's output in, four streams and the layer input out, the weight, the mixes."""
    params = shared.params_of(case)
    rows = 2 * STREAMS + 2 + params["aux"]
    return int(rows * shared.row_bytes(params) + shared.fn_bytes(params) + 3 * shared.mix_bytes(params))


def flops(case: Case) -> int:
    """The projection, five products and sums for each element of the streams, four for each of the layer input."""
    params = shared.params_of(case)
    return shared.projection_flops(params) + 24 * shared.row_bytes(params)
