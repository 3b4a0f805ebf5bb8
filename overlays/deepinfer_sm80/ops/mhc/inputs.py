"""Inputs that the workloads of the mHC ops share, made from a case's parameters, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..spec import Case, Tolerance
from .coefficients import MIXES, STREAMS, Mixing

HIDDEN = 5120
# token counts that the benchmarks time
BENCH_TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 33, 48, 64, 128, 256, 1024, 2048, 8192)
DEFAULTS: Mapping[str, Any] = {
    "hidden": HIDDEN,
    # standard deviation of residual and x
    "magnitude": 1.0,
    "pre_mix": True,
    "norm": True,
    "embedding": False,
    "aux": False,
    # what the model uses: RMS eps 1e-20, mHC eps 1e-6, post factor 2, 20 iterations
    "rms_eps": 1e-20,
    "norm_eps": 1e-20,
    "pre_eps": 1e-6,
    "sinkhorn_eps": 1e-6,
    "factor": 2.0,
    "repeat": 20,
    # rows that hold a NaN, or nothing but zeros
    "nan_rows": (),
    "zero_rows": (),
    "out": True,
    # rows that are also given alone: the output `seam` is how far their coefficients are off then
    "seam": 0,
}
# stock's own coefficients differ by so much where it switches from one projection to another
SEAM = Tolerance(max_abs=6.5e-4)
# stock's names of the numbers in Mixing
STOCK_NAMES = {
    "rms_eps": "rms_eps",
    "hc_pre_eps": "pre_eps",
    "hc_sinkhorn_eps": "sinkhorn_eps",
    "hc_post_mult_value": "post_factor",
    "sinkhorn_repeat": "iterations",
}
# the inputs that have a row per token
PER_TOKEN = ("x", "residual", "post_layer_mix", "comb_res_mix", "pre_mix")


def bench_cases(op: str) -> tuple[Case, ...]:
    """One case for each of BENCH_TOKENS, outputs made by the op as in an engine."""
    return tuple(
        Case(
            op, f"{tokens}-tokens", "bench", {"tokens": tokens, "hidden": HIDDEN, "out": False}, gpu_only=True
        )
        for tokens in BENCH_TOKENS
    )


def params_of(case: Case) -> dict[str, Any]:
    """The case's parameters with the defaults filled in."""
    return {**DEFAULTS, **case.params}


def post_inputs(
    params: Mapping[str, Any], generator: torch.Generator, device: str | torch.device
) -> dict[str, Any]:
    """`x`, `residual`, `post_layer_mix` and `comb_res_mix`: mixes as a step before would leave them."""
    tokens, hidden = params["tokens"], params["hidden"]
    comb = _randn(generator, device, tokens, STREAMS, STREAMS).softmax(-1)
    for _ in range(3):
        comb = comb / comb.sum(-2, keepdim=True)
        comb = comb / comb.sum(-1, keepdim=True)
    return {
        "x": _rows(params, generator, device, tokens, hidden),
        "residual": residual(params, generator, device),
        "post_layer_mix": 2 * _randn(generator, device, tokens, STREAMS, 1).sigmoid(),
        "comb_res_mix": comb.contiguous(),
    }


def residual(
    params: Mapping[str, Any], generator: torch.Generator, device: str | torch.device
) -> torch.Tensor:
    """Residual streams `[T, 4, H]` bf16: a part that the streams share, and one of their own."""
    shape = params["tokens"], STREAMS, params["hidden"]
    own = _randn(generator, device, *shape)
    shared = _randn(generator, device, shape[0], 1, shape[2])
    streams = ((own + shared) * (params["magnitude"] * 0.5**0.5)).bfloat16()
    for row in params["zero_rows"]:
        streams[row] = 0
    for row in params["nan_rows"]:
        streams[row, 1, 7] = float("nan")
    return streams


def pre_inputs(
    params: Mapping[str, Any], generator: torch.Generator, device: str | torch.device
) -> dict[str, Any]:
    """What a pre step takes beside the residual.

    fn is scaled so that the normalised mixes have a standard deviation of 1: an error in them is then one in the
    steep part of the sigmoids and the softmax.
    """
    tokens, hidden = params["tokens"], params["hidden"]
    width = hidden if params["embedding"] else STREAMS * hidden
    inputs = {
        "fn": _randn(generator, device, MIXES, width) * width**-0.5,
        "hc_scale": 0.5 + torch.rand(3, generator=generator).to(device),
        "hc_base": _randn(generator, device, MIXES),
        "mixing": Mixing(
            params["rms_eps"], params["pre_eps"], params["sinkhorn_eps"], params["factor"], params["repeat"]
        ),
        "pre_mix": _randn(generator, device, tokens, STREAMS).sigmoid() if params["pre_mix"] else None,
        "norm_weight": (1 + 0.2 * _randn(generator, device, hidden)).bfloat16() if params["norm"] else None,
        "norm_eps": params["norm_eps"],
    }
    if params["embedding"]:
        inputs["x"] = _rows(params, generator, device, tokens, hidden)
    return inputs


def nan(device: str | torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """An output that is nothing yet."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def pre_outputs(params: Mapping[str, Any], device: str | torch.device) -> tuple[torch.Tensor, ...]:
    """The outputs of a pre step, nothing but NaN."""
    tokens = params["tokens"]
    return (
        nan(device, torch.float32, tokens, STREAMS, 1),
        nan(device, torch.float32, tokens, STREAMS, STREAMS),
        nan(device, torch.bfloat16, tokens, params["hidden"]),
        nan(device, torch.float32, tokens, STREAMS),
    )


def stock_kwargs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same call for stock's function, which makes its outputs and takes the numbers of `Mixing` one by one."""
    kwargs = {name: value for name, value in inputs.items() if name not in ("out", "mixing")}
    if "mixing" in inputs:
        kwargs |= {name: getattr(inputs["mixing"], ours) for name, ours in STOCK_NAMES.items()}
    return kwargs


def row_bytes(params: Mapping[str, Any]) -> int:
    """Bytes of one bf16 row of `hidden` columns for every token."""
    return int(2 * params["tokens"] * params["hidden"])


def fn_bytes(params: Mapping[str, Any]) -> int:
    """Bytes of the projection's weight."""
    return int(4 * MIXES * params["hidden"] * (1 if params["embedding"] else STREAMS))


def mix_bytes(params: Mapping[str, Any]) -> int:
    """Bytes of one set of post, comb and pre-mixes for every token."""
    return int(4 * MIXES * params["tokens"])


def projection_flops(params: Mapping[str, Any]) -> int:
    """Multiplications and additions of the projection."""
    return int(2 * params["tokens"] * fn_bytes(params) // 4)


def _rows(
    params: Mapping[str, Any], generator: torch.Generator, device: str | torch.device, *shape: int
) -> torch.Tensor:
    return (_randn(generator, device, *shape) * params["magnitude"]).bfloat16()


def _randn(generator: torch.Generator, device: str | torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(device)
