"""Workloads of `kv_insert`: cases, inputs and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..rope_quant import inputs as make
from ..rope_quant import suites
from ..spec import Case, Tolerance, case_maker
from . import HEAD_DIM, RECORD_BYTES, kv_insert, reference

OP = "kv_insert"
TOLERANCES = {"cache": Tolerance()}


_case = case_maker(OP)
_SMOKE = (
    *suites.smoke(_case),
    _case("ratio-1", tokens=40),
    _case("ratio-2", tokens=81, ratio=2),
    _case("groups-at-the-edges-of-a-scale", tokens=90, kind="edges"),
    _case("not-finite", tokens=60, kind="nonfinite"),
    _case("page-stride-2-more", tokens=30, page_gap=2),
    _case("cache-shifted-by-2", tokens=20, cache_shift=2),
    _case("latent-shifted", tokens=20, latent_shift=1),
)
_FULL = suites.full(_case, blocks_over_2gib=60_000)


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """The writers' own sizes."""
    return suites.bench(_case)


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `kv_insert`, made from the case's seed; the cache is filled with POISON."""
    params = case.params
    generator = torch.Generator().manual_seed(case.seed)
    rows = params["tokens"] + params.get("spare_rows", 0)
    latent = make.bf16_rows((rows, HEAD_DIM), params.get("kind", "random"), generator)
    if params.get("kind") == "nonfinite":
        # what a NaN's bits become on the way through a rotation is nobody's contract
        latent[:, 448:] = latent[:, 448:].nan_to_num(1.0, 2.0, -2.0)
    positions = make.positions_of(params, generator)
    return {
        "latent": make.spaced(latent, HEAD_DIM, params.get("latent_shift", 0), float("nan"), device),
        "positions": positions.to(device),
        "cos_sin_cache": make.cos_sin_table(params, device),
        "kv_cache": make.empty_cache(params, RECORD_BYTES, 576, device),
        "slot_mapping": make.slots_of(params, generator).to(device),
        "compress_ratio": params.get("ratio", 1),
    }


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The bytes of the oracle's cache, for inputs that no one has written to yet."""
    copy = make.copy_of(inputs["kv_cache"])
    reference.kv_insert(**{**inputs, "kv_cache": copy})
    return _outputs({**inputs, "kv_cache": copy})


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the cache's bytes."""
    (function or kv_insert)(**inputs)
    return _outputs(inputs)


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's function (every `style`)."""
    return dict(inputs)


def bytes_moved(case: Case) -> int:
    """Bytes that must be read and written: positions and slots of all, row, table row and record of those written."""
    tokens = case.params["tokens"]
    return tokens * 16 + tokens // case.params.get("ratio", 1) * (1024 + 256 + RECORD_BYTES)


def flops(case: Case) -> int:
    """One product per code, three operations per rotated element."""
    return case.params["tokens"] // case.params.get("ratio", 1) * (448 + 3 * 64)


def _outputs(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    cache = inputs["kv_cache"]
    return {"cache": make.written_part(cache, inputs["slot_mapping"].shape[0], cache.shape[1])}
