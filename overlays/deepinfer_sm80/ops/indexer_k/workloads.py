"""Workloads of `indexer_k`: cases, inputs and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..rope_quant import inputs as make
from ..rope_quant import suites
from ..spec import Case, Tolerance, case_maker
from . import HEAD_DIM, RECORD_BYTES, indexer_k, reference

OP = "indexer_k"
TOLERANCES = {"cache": Tolerance()}


_case = case_maker(OP)
_SMOKE = (
    *suites.smoke(_case),
    _case("ratio-1", tokens=90),
    _case("ratio-2", tokens=161, ratio=2),
    _case("sizes-at-the-edges", tokens=90, kind="edges"),
    _case("sizes-at-modest-edges", tokens=90, kind="modest"),
    _case("larger-epsilon", tokens=60, kind="modest", eps=1e-6),
    _case("not-finite", tokens=80, kind="nonfinite"),
    _case("page-stride-4-more", tokens=30, page_gap=4),
    _case("cache-shifted-by-4", tokens=20, cache_shift=4),
    _case("keys-shifted", tokens=20, key_shift=1),
    _case("keys-apart", tokens=30, key_stride=136),
    _case("keys-apart-by-an-odd-number", tokens=30, key_stride=131),
)
_FULL = suites.full(_case, blocks_over_2gib=260_000)


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """The writers' own sizes."""
    return suites.bench(_case)


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `indexer_k`, made from the case's seed; the cache is filled with POISON."""
    params = case.params
    generator = torch.Generator().manual_seed(case.seed)
    rows = params["tokens"] + params.get("spare_rows", 0)
    keys = make.bf16_rows((rows, HEAD_DIM), params.get("kind", "random"), generator)
    stride, shift = params.get("key_stride", HEAD_DIM), params.get("key_shift", 0)
    positions = make.positions_of(params, generator)
    weight = 1 + torch.randn(HEAD_DIM, generator=generator) / 4
    return {
        "k_pre": make.spaced(keys, stride, shift, float("nan"), device),
        "positions": positions.to(device),
        "cos_sin_cache": make.cos_sin_table(params, device),
        "norm_weight": weight.bfloat16().to(device),
        "norm_eps": params.get("eps", 1e-20),
        "k_cache": make.empty_cache(params, RECORD_BYTES, 576, device),
        "slot_mapping": make.slots_of(params, generator).to(device),
        "compress_ratio": params.get("ratio", 1),
    }


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The bytes of the oracle's cache, for inputs that no one has written to yet."""
    copy = make.copy_of(inputs["k_cache"])
    reference.indexer_k(**{**inputs, "k_cache": copy})
    return _outputs({**inputs, "k_cache": copy})


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the cache's bytes."""
    (function or indexer_k)(**inputs)
    return _outputs(inputs)


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's function (every `style`)."""
    renamed = {
        "norm_weight": "rms_norm_weight",
        "norm_eps": "rms_norm_eps",
        "slot_mapping": "kv_slot_mapping",
    }
    return {renamed.get(name, name): value for name, value in inputs.items()} | {"use_fp4_cache": False}


def bytes_moved(case: Case) -> int:
    """Bytes that must be read and written: positions and slots of all, row, table row and record of those written."""
    tokens = case.params["tokens"]
    return tokens * 16 + tokens // case.params.get("ratio", 1) * (256 + 256 + RECORD_BYTES)


def flops(case: Case) -> int:
    """Norm, rotation and one product per code."""
    return case.params["tokens"] // case.params.get("ratio", 1) * (5 * 128 + 3 * 64)


def _outputs(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    cache = inputs["k_cache"]
    return {"cache": make.written_part(cache, inputs["slot_mapping"].shape[0], cache.shape[1])}
