"""What the workloads of the mHC ops share: cases by their names, running an op, and what only some cases ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from ..spec import Case, Tolerance, UlpTolerance
from . import inputs as shared

Rows = Iterable[tuple[str, Mapping[str, Any]]]
Outputs = dict[str, torch.Tensor]

# cases of an op with a post step alone, smoke and full
POST_SMOKE: Rows = (
    ("no-tokens", {"tokens": 0}),
    ("one-token", {"tokens": 1}),
    ("seven-tokens", {"tokens": 7}),
    ("nan-row", {"tokens": 5, "nan_rows": (2,), "zero_rows": (4,)}),
    ("own-output", {"tokens": 3, "out": False}),
)
POST_FULL: Rows = (("hidden-4096", {"tokens": 9, "hidden": 4096}), ("1025-tokens", {"tokens": 1025}))

# what an op with a pre step is held to
PRE_TOLERANCES = {
    "post": Tolerance(max_abs=1.9e-3),
    "comb": Tolerance(max_abs=1.9e-3),
    "layer_input": UlpTolerance(),
    "next_pre_mix": Tolerance(max_abs=1.9e-3),
}
LARGE_EPS = {"pre_eps": 0.03, "sinkhorn_eps": 0.02, "repeat": 4, "rms_eps": 0.5, "norm_eps": 0.25}
PRE_SMOKE: Rows = (
    ("no-tokens", {"tokens": 0}),
    ("one-token", {"tokens": 1}),
    ("17-tokens", {"tokens": 17}),
    ("stream-0", {"tokens": 5, "pre_mix": False}),
    # converged after twenty iterations and blind to an eps of 1e-6: a fault there shows only here
    ("three-iterations", {"tokens": 6, "repeat": 3}),
    ("large-eps", {"tokens": 6, **LARGE_EPS}),
    ("large", {"tokens": 5, "magnitude": 3e3}),
    ("small", {"tokens": 5, "magnitude": 1e-4}),
)
# around each border of the tables
PRE_TOKENS = (15, 16, 33, 48, 49, 63, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 1031, 2048, 8192)
PRE_FULL: Rows = (
    *((f"{tokens}-tokens", {"tokens": tokens}) for tokens in PRE_TOKENS),
    ("100-tokens-nan-row", {"tokens": 100, "nan_rows": (0, 40, 99)}),
    ("hidden-4096", {"tokens": 20, "hidden": 4096}),
    # stock's border and each of the tables'
    *((f"seam-{n}", {"tokens": n + 1, "seam": n}) for n in (32, 48, 64, 128, 256, 512)),
    ("seam-1", {"tokens": 2048, "seam": 1}),
    ("hidden-1024-many-tokens", {"tokens": 3000, "hidden": 1024}),
)
# what asks for further outputs; no arguments of an op
FURTHER = ("raw", "seam")


def cases_of(op: str, suite: str, rows: Rows, *own: tuple[str, Mapping[str, Any]]) -> tuple[Case, ...]:
    """Cases of `op`: those that it shares, then its own."""
    # no kernel of these ops runs on a CPU
    return tuple(Case(op, name, suite, params, gpu_only=True) for name, params in (*rows, *own))


def further(params: Mapping[str, Any]) -> dict[str, Any]:
    """What of a case asks for further outputs."""
    return {name: params[name] for name in FURTHER if params.get(name)}


def called(outputs: Iterable[str], function: Callable[..., Any], inputs: Mapping[str, Any]) -> Outputs:
    """Calls a function of the op's contract; its results by name."""
    kwargs = {name: value for name, value in inputs.items() if name not in FURTHER}
    return dict(zip(outputs, function(**kwargs), strict=True))


def ran(outputs: Iterable[str], function: Callable[..., Any], inputs: Mapping[str, Any]) -> Outputs:
    """`called`, and the seam where the case asks for it."""
    made = called(outputs, function, inputs)
    if inputs.get("seam"):
        made["seam"] = _seam(made, inputs, partial(called, outputs, function))
    return made


def wanted(outputs: Iterable[str], oracle: Callable[..., Any], inputs: Mapping[str, Any]) -> Outputs:
    """What the oracle makes of inputs that no one has written to yet; there is no seam."""
    made = called(outputs, oracle, {**inputs, "out": None})
    if inputs.get("seam"):
        made["seam"] = torch.zeros_like(_coefficients(made)[: inputs["seam"]])
    return made


def _coefficients(outputs: Outputs) -> torch.Tensor:
    """Post, residual and pre-mixes of every token, `[T, 24]` f32."""
    return torch.cat([outputs[name].flatten(1) for name in ("post", "comb", "next_pre_mix")], dim=1)


def _seam(outputs: Outputs, inputs: Mapping[str, Any], call: Callable[..., Outputs]) -> torch.Tensor:
    """How far the first rows' coefficients are off when nothing but these rows is given, `[tokens, 24]`."""
    tokens = inputs["seam"]
    rows = {name: inputs[name][:tokens] for name in shared.PER_TOKEN if inputs.get(name) is not None}
    alone = call({**inputs, **rows, "out": None})
    return _coefficients(outputs)[:tokens] - _coefficients(alone)
