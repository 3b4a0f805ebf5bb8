"""Workloads of `mhc_fused_post_pre_delayed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..mhc import inputs as shared
from ..spec import Case, Tolerance, UlpTolerance
from . import mhc_fused_post_pre_delayed, reference

OP = "mhc_fused_post_pre_delayed"
TOLERANCES = {
    "residual": Tolerance(),
    "post": Tolerance(max_abs=1.9e-3),
    "comb": Tolerance(max_abs=1.9e-3),
    "layer_input": UlpTolerance(),
    "next_pre_mix": Tolerance(max_abs=1.9e-3),
    "aux": Tolerance(),
}
OUTPUTS = tuple(TOLERANCES)
# of some cases only: the difference that a smaller batch makes
TOLERANCES |= {"seam": shared.SEAM}

_case = shared.case_maker(OP)
_SMOKE = (
    _case("no-tokens", tokens=0),
    _case("no-tokens-aux", tokens=0, aux=True),
    _case("one-token", tokens=1),
    _case("seven-tokens-aux", tokens=7, aux=True),
    _case("17-tokens", tokens=17),
    _case("stream-0", tokens=5, pre_mix=False),
    _case("no-norm", tokens=5, norm=False, aux=True),
    # converged after twenty iterations and blind to an eps of 1e-6: a fault there shows only here
    _case("three-iterations", tokens=6, repeat=3),
    _case("large-eps", tokens=6, pre_eps=0.03, sinkhorn_eps=0.02, repeat=4, rms_eps=0.5, norm_eps=0.25),
    _case("large", tokens=5, magnitude=3e3),
    _case("small", tokens=5, magnitude=1e-4),
    _case("nan-row", tokens=6, nan_rows=(2,), zero_rows=(4,), aux=True),
    _case("own-output", tokens=3, out=False, aux=True),
)
_FULL = (
    # stock's seam lies at 32
    *(_case(f"{tokens}-tokens", "full", tokens=tokens) for tokens in (15, 16, 31, 32, 33, 48, 49, 63, 64)),
    *(
        _case(f"{tokens}-tokens", "full", tokens=tokens)
        for tokens in (65, 128, 129, 256, 257, 512, 513, 1024, 1031)
    ),
    _case("2048-tokens", "full", tokens=2048),
    _case("1031-tokens-aux", "full", tokens=1031, aux=True),
    _case("100-tokens-nan-row", "full", tokens=100, nan_rows=(0, 40, 99)),
    _case("8192-tokens", "full", tokens=8192),
    _case("hidden-4096", "full", tokens=20, hidden=4096),
    # stock's border and each of the table's
    *(_case(f"seam-{n}", "full", tokens=n + 1, seam=n) for n in (32, 48, 64, 128)),
    _case("seam-1", "full", tokens=2048, seam=1),
    _case("hidden-1024-many-tokens", "full", tokens=3000, hidden=1024),
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
    return {**inputs, "out": out, **_further(params)}


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's outputs, for inputs that no one has written to yet."""
    outputs = _call(reference.mhc_fused_post_pre_delayed, **{**inputs, "out": None})
    if inputs.get("seam"):
        outputs["seam"] = torch.zeros_like(shared.coefficients(outputs)[: inputs["seam"]])
    return outputs


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole outputs."""
    call = partial(_call, function or mhc_fused_post_pre_delayed)
    outputs = call(**inputs)
    if inputs.get("seam"):
        outputs["seam"] = shared.seam(outputs, inputs, inputs["seam"], call)
    return outputs


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's function (every `style`)."""
    return shared.stock_kwargs(inputs)


def bytes_moved(case: Case) -> int:
    """Four streams and the sublayer's output in, four streams and the layer input out, the weight, the mixes."""
    params = shared.params_of(case)
    rows = 2 * shared.STREAMS + 2 + params["aux"]
    return int(rows * shared.row_bytes(params) + shared.fn_bytes(params) + 3 * shared.mix_bytes(params))


def flops(case: Case) -> int:
    """The projection, five products and sums for each element of the streams, four for each of the layer input."""
    params = shared.params_of(case)
    return shared.projection_flops(params) + 24 * shared.row_bytes(params)


def _call(function: Callable[..., Any], **inputs: Any) -> dict[str, torch.Tensor]:
    kwargs = {name: value for name, value in inputs.items() if name not in ("seam",)}
    return dict(zip(OUTPUTS, function(**kwargs), strict=True))


def _further(params: Mapping[str, Any]) -> dict[str, Any]:
    """What asks for further outputs; no argument of the op."""
    return {name: params[name] for name in ("seam",) if params.get(name)}
