"""Workloads of `indexer_q`: cases, inputs and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..rope_quant import inputs as make
from ..spec import Case, Tolerance, case_maker
from . import HEAD_DIM, indexer_q, reference

OP = "indexer_q"
TOLERANCES = {"codes": Tolerance(), "weights": Tolerance()}
HEADS = 32


_case = case_maker(OP)
_SMOKE = (
    _case("one-token", tokens=1),
    _case("seven-tokens", tokens=7, first=4090),
    _case("scattered-positions", tokens=9, scattered=True, rows=3000),
    _case("64-heads", tokens=3, heads=64),
    _case("5-heads", tokens=5, heads=5),
    _case("one-head", tokens=6, heads=1),
    _case("no-heads", tokens=6, heads=0),
    _case("heads-at-the-edges-of-a-scale", tokens=12, kind="edges"),
    _case("heads-at-modest-edges", tokens=12, kind="modest"),
    _case("not-finite", tokens=12, kind="nonfinite"),
    _case("another-factor", tokens=5, factor=0.3),
    _case("no-tokens", tokens=0),
    _case("tokens-apart", tokens=5, token_gap=64),
    _case("tokens-apart-by-a-word", tokens=5, token_gap=2),
    _case("tokens-apart-by-an-odd-number", tokens=5, token_gap=3),
    _case("queries-shifted-by-a-word", tokens=5, shift=2),
    _case("queries-shifted", tokens=5, shift=1),
    _case("weights-apart", tokens=5, weights_stride=41),
    _case("table-rows-apart", tokens=6, table_stride=67),
)
_FULL = (
    _case("2048-tokens", "full", tokens=2048, gpu_only=True),
    _case("2048-edges", "full", tokens=2048, kind="edges", gpu_only=True),
    _case("4096-scattered-over-a-million", "full", tokens=4096, scattered=True, rows=1 << 20, gpu_only=True,
          memory_bytes=3 << 29),
    _case("queries-over-4GiB", "full", tokens=40, token_gap=1 << 26, gpu_only=True, memory_bytes=6 << 30),
)  # fmt: skip


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """Decode batches and prefill chunks."""
    return tuple(
        _case(f"{tokens}-tokens", "bench", tokens=tokens, gpu_only=True)
        for tokens in (1, 6, 24, 96, 2048, 8192)
    )


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `indexer_q`, made from the case's seed."""
    params = case.params
    generator = torch.Generator().manual_seed(case.seed)
    tokens, heads = params["tokens"], params.get("heads", HEADS)
    queries = make.bf16_rows((tokens, heads, HEAD_DIM), params.get("kind", "random"), generator)
    stride = heads * HEAD_DIM + params.get("token_gap", 0)
    placed = make.spaced(queries.flatten(1), stride, params.get("shift", 0), float("nan"), device)
    weights = torch.randn((tokens, heads), generator=generator).bfloat16()
    return {
        "positions": make.positions_of(params, generator).to(device),
        "q": placed.unflatten(1, (heads, HEAD_DIM)),
        "cos_sin_cache": make.cos_sin_table(params, device),
        "weights": make.spaced(weights, params.get("weights_stride", heads), 0, float("nan"), device),
        "scale": params.get("factor", HEAD_DIM**-0.5 * HEADS**-0.5),
    }


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's outputs."""
    return _outputs(reference.indexer_q(**inputs))


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place."""
    return _outputs((function or indexer_q)(**inputs))


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's function (every `style`), which takes the factor in two parts."""
    return {
        "positions": inputs["positions"],
        "index_q": inputs["q"],
        "index_q_cos_sin_cache": inputs["cos_sin_cache"],
        "index_weights": inputs["weights"],
        "index_weights_softmax_scale": inputs["scale"],
        "index_weights_head_scale": 1.0,
        "use_fp4": False,
    }


def bytes_moved(case: Case) -> int:
    """Bytes that must be read and written: a query and its weight in, its codes and its weight out, a table row."""
    tokens, heads = case.params["tokens"], case.params.get("heads", HEADS)
    return int(tokens * (heads * (256 + 2 + 128 + 4) + 256 + 8))


def flops(case: Case) -> int:
    """One product per code, three operations per rotated element."""
    return int(case.params["tokens"] * case.params.get("heads", HEADS) * (128 + 3 * 64))


def _outputs(result: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    codes, weights = result
    return {"codes": codes, "weights": weights}
