"""Workloads of `mhc_pre_delayed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..mhc import inputs as shared
from ..mhc.coefficients import MIXES, STREAMS
from ..mhc.reference import project as projected
from ..mhc.suites import PRE_FULL, PRE_SMOKE, PRE_TOLERANCES, cases_of, further, ran, wanted
from ..spec import Case, Tolerance
from . import mhc_pre_delayed, reference

OP = "mhc_pre_delayed"
OUTPUTS = tuple(PRE_TOLERANCES)
# of some cases only: what the first kernel leaves, added up, and the difference that a smaller batch makes
TOLERANCES = PRE_TOLERANCES | {
    "raw_mixes": Tolerance(max_abs=1.9e-3),
    "sqrsum": Tolerance(max_rel=1e-5),
    "seam": shared.SEAM,
}
# up to each border of the table, and beyond
RAW_TOKENS = (1, 48, 49, 64, 65, 128, 129, 256, 257, 512, 513, 2048)
_SMOKE = cases_of(
    OP,
    "smoke",
    PRE_SMOKE,
    ("seven-tokens", {"tokens": 7}),
    ("first-layer", {"tokens": 9, "embedding": True, "pre_mix": False}),
    ("embedding-and-pre-mix", {"tokens": 9, "embedding": True}),
    ("no-norm", {"tokens": 5, "norm": False}),
    ("stream-0-no-norm", {"tokens": 5, "pre_mix": False, "norm": False}),
    ("one-iteration", {"tokens": 6, "repeat": 1}),
    ("nan-row", {"tokens": 6, "nan_rows": (2,), "zero_rows": (4,)}),
    ("own-output", {"tokens": 3, "out": False}),
)
_FULL = cases_of(
    OP,
    "full",
    PRE_FULL,
    ("1031-tokens-first-layer", {"tokens": 1031, "embedding": True, "pre_mix": False}),
    ("1031-tokens-no-norm", {"tokens": 1031, "norm": False}),
    *((f"raw-{n}", {"tokens": n, "raw": True}) for n in RAW_TOKENS),
    *((f"raw-x-{n}", {"tokens": n, "raw": True, "embedding": True}) for n in (7, 64, 128, 300, 700)),
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
        "residual": shared.residual(params, generator, device),
        **shared.pre_inputs(params, generator, device),
    }
    for row in params["nan_rows"] if params["embedding"] else ():
        inputs["x"][row, 3] = float("nan")
    return {
        **inputs,
        "out": shared.pre_outputs(params, device) if params["out"] else None,
        **further(params),
    }


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's outputs, for inputs that no one has written to yet."""
    outputs = wanted(OUTPUTS, reference.mhc_pre_delayed, inputs)
    return outputs | (_oracle_parts(inputs) if inputs.get("raw") else {})


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole outputs."""
    outputs = ran(OUTPUTS, function or mhc_pre_delayed, inputs)
    if inputs.get("raw"):
        # only the op has a first kernel
        outputs |= _kernel_parts(inputs) if function is None else _oracle_parts(inputs)
    return outputs


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's function (every `style`)."""
    return shared.stock_kwargs(inputs)


def bytes_moved(case: Case) -> int:
    """The residual once, the weight, the layer input, and the mixes in and out."""
    params = shared.params_of(case)
    rows = STREAMS + 1 + params["embedding"]
    return int(rows * shared.row_bytes(params) + shared.fn_bytes(params) + 2 * shared.mix_bytes(params))


def flops(case: Case) -> int:
    """The projection, and four products and sums for each element of the layer input."""
    params = shared.params_of(case)
    return shared.projection_flops(params) + 4 * shared.row_bytes(params)


def _oracle_parts(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    row = inputs.get("x")
    mixes, sqrsum = projected(inputs["residual"].flatten(1) if row is None else row, inputs["fn"])
    return {"raw_mixes": mixes.float(), "sqrsum": sqrsum.float()}


def _kernel_parts(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from ..mhc.tilelang import launch_projection

    residual, fn = inputs["residual"], inputs["fn"]
    collapsed = torch.empty_like(residual[:, 0], memory_format=torch.contiguous_format)
    mixes = fn.new_empty((residual.shape[0], STREAMS))
    parts = launch_projection(residual, fn, collapsed, mixes, pre_mix=inputs["pre_mix"], x=inputs.get("x"))
    total = parts.double().sum(0).float()
    return {"raw_mixes": total[:, :MIXES], "sqrsum": total[:, MIXES]}
