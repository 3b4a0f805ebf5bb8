"""Workloads of `kv_insert`: cases, inputs and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..rope_quant import inputs as make
from ..spec import Case, Tolerance
from . import HEAD_DIM, RECORD_BYTES, kv_insert, reference

OP = "kv_insert"
TOLERANCES = {"cache": Tolerance()}


def _case(
    name: str, suite: str = "smoke", *, gpu_only: bool = False, memory_bytes: int = 0, **params: Any
) -> Case:
    return Case(OP, name, suite, params, gpu_only, memory_bytes)


_SMOKE = (
    _case("one-token", tokens=1),
    _case("one-token-that-ends-no-group", tokens=1, ratio=2, skipped=0.0),
    _case("one-token-that-ends-a-group", tokens=1, ratio=2, first=7, skipped=0.0),
    _case("ratio-1", tokens=40),
    _case("ratio-2", tokens=81, ratio=2),
    _case("ratio-2-from-an-odd-position", tokens=80, ratio=2, first=4097),
    _case("ratio-4", tokens=60, ratio=4, first=2),
    _case("scattered-positions", tokens=70, ratio=2, scattered=True, rows=3000),
    _case("groups-at-the-edges-of-a-scale", tokens=90, kind="edges"),
    _case("not-finite", tokens=60, kind="nonfinite"),
    _case("everything-skipped", tokens=9, skipped=1.1),
    _case("no-tokens", tokens=0),
    _case("block-32", tokens=70, block_size=32),
    _case("block-37", tokens=50, block_size=37),
    _case("block-1", tokens=9, block_size=1),
    _case("pages-of-other-layers-between", tokens=30, page_gap=5 * 576),
    _case("page-stride-2-more", tokens=30, page_gap=2),
    _case("cache-shifted-by-2", tokens=20, cache_shift=2),
    _case("latent-shifted", tokens=20, latent_shift=1),
    _case("table-rows-apart", tokens=30, table_stride=67),
    _case("more-rows-than-slots", tokens=30, spare_rows=5),
)
_FULL = (
    _case("8192-tokens", "full", tokens=8192, gpu_only=True),
    _case("8192-tokens-ratio-2", "full", tokens=8192, ratio=2, first=131_073, gpu_only=True),
    _case("8192-edges", "full", tokens=8192, kind="edges", gpu_only=True),
    _case("16384-scattered-over-a-million", "full", tokens=16384, scattered=True, rows=1 << 20, ratio=2,
          block_size=128, gpu_only=True, memory_bytes=1 << 30),
    _case("cache-over-2GiB", "full", tokens=4000, num_blocks=60_000, gpu_only=True, memory_bytes=3 << 30),
)  # fmt: skip


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """Decode batches and prefill chunks of a layer whose groups are of one token, and of one with two."""
    shared: dict[str, Any] = {"skipped": 0.0, "gpu_only": True}
    sizes = [(tokens, 1) for tokens in (1, 24, 2048, 8192, 16384)] + [(8192, 2)]
    return tuple(
        _case(f"{tokens}-tokens-ratio-{ratio}", "bench", tokens=tokens, ratio=ratio, **shared)
        for tokens, ratio in sizes
    )


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
