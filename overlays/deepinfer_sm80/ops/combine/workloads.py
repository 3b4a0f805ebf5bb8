"""Workloads of `combine`: cases, inputs and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..spec import Case, Tolerance, case_maker
from . import combine, reference

OP = "combine"
TOLERANCES = {"indices": Tolerance(), "lens": Tolerance()}
# fills whatever the op must overwrite, or must not touch
SENTINEL = -777
# what each release's function does, as keyword arguments of ours
CONTRACTS = {
    "rocm": {"replay_clamp": False, "width_cap": True},
    "common-0.30": {"replay_clamp": False, "width_cap": False},
    "common": {"replay_clamp": True, "width_cap": False},
}
_case = case_maker(OP)

_SMOKE = (
    _case("one-token", query_lens=[1], seq_lens=[300]),
    _case("two-requests", query_lens=[5, 7], seq_lens=[200, 7]),
    _case("ratio-1", query_lens=[9], seq_lens=[40], ratio=1),
    _case("window-only", query_lens=[6, 3], seq_lens=[6, 140], ratio=0, topk=0, N=0),
    _case("ratio-0-keeps-topk-out", query_lens=[6], seq_lens=[90], ratio=0),
    _case("rocm", query_lens=[5, 7], seq_lens=[200, 60], contract="rocm"),
    _case("rocm-ratio-0", query_lens=[5, 7], seq_lens=[200, 60], contract="rocm", ratio=0, topk=0, N=0),
    _case("rocm-narrow-topk", query_lens=[8], seq_lens=[200], contract="rocm", W=19),
    _case("rocm-three-dims", query_lens=[8], seq_lens=[200], contract="rocm", three_dims=True),
    _case("common-0.30", query_lens=[5, 7], seq_lens=[200, 60], contract="common-0.30", gather_lens=[20, 30]),
    _case("common-narrow-topk", query_lens=[8], seq_lens=[200], W=19),
    _case("replayed-window", query_lens=[16, 4], seq_lens=[400, 260], gather_lens=[16, 50]),
    _case("holes", query_lens=[12], seq_lens=[500], holes=0.6),
    _case("negative-positions", query_lens=[16, 4], seq_lens=[5, 4]),
    _case("rocm-negative-positions", query_lens=[16, 4], seq_lens=[5, 4], contract="rocm"),
    _case("based-query-starts", query_lens=[3, 4], seq_lens=[90, 80], base=1000),
    _case("requests-without-queries", query_lens=[0, 3, 0, 0, 4, 0], seq_lens=[9, 90, 5, 0, 80, 7]),
    _case("tokens-of-no-request", query_lens=[3, 4], seq_lens=[90, 80], spare_tokens=2),
    _case("no-tokens", query_lens=[0], seq_lens=[12]),
    _case("no-tokens-rows-to-clear", query_lens=[0], seq_lens=[12], spare_rows=3),
    _case("larger-buffers", query_lens=[5], seq_lens=[99], spare_rows=2, spare_columns=131),
    _case("row-gaps", query_lens=[5], seq_lens=[99], row_gap=3, topk_gap=5),
    _case("unaligned-inputs", query_lens=[5, 2], seq_lens=[99, 40], shift=1),
    _case("narrow-tile", query_lens=[5], seq_lens=[99], topk=20, window=17),
    _case("several-tiles", query_lens=[2], seq_lens=[4000], topk=1500, window=700),
    _case("40-requests", query_lens=[1] * 40, seq_lens=list(range(1, 41))),
    _case("int64-inputs", query_lens=[3, 4], seq_lens=[90, 80], int64=True),
)
_FULL = (
    _case(
        "300-requests",
        "full",
        query_lens=[i % 5 for i in range(300)],
        seq_lens=[i % 999 + 4 for i in range(300)],
    ),
    _case("rocm-chunk", "full", query_lens=[900, 636], seq_lens=[8192, 700], contract="rocm", gpu_only=True),
    _case("chunk", "full", query_lens=[4000, 0, 1, 2143], seq_lens=[9000, 1, 1, 2143], gpu_only=True),
    _case("workspace-over-int32", "full", query_lens=[1] * 3, seq_lens=[64] * 3, M=1_500_000_000),
)


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """The last T tokens of one request with 8,192 tokens of context."""
    return tuple(
        _case(f"{n}-tokens", "bench", tokens=n, context=8192, ratio=2, topk=512, window=128, gpu_only=True)
        for n in (96, 384, 1536, 6144)
    )


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `combine`, made from the case's seed; `out`, if any, is filled with SENTINEL."""
    params = _with_defaults(case.params)
    generator = torch.Generator().manual_seed(case.seed)
    starts = torch.tensor([0, *params["query_lens"]]).cumsum(0)
    num_tokens = int(starts[-1]) + params["spare_tokens"]
    vectors = {
        "query_start_loc": starts + params["base"],
        "seq_lens": torch.tensor(params["seq_lens"]),
        "gather_lens": torch.tensor(params["gather_lens"]),
    }
    dtype = torch.int64 if params["int64"] else torch.int32
    return {
        "topk_indices": _make_topk(params, num_tokens, generator).to(dtype).to(device)[:, ..., : params["W"]],
        **{name: _shifted(vector.to(dtype), params["shift"], device) for name, vector in vectors.items()},
        "window_size": params["window"],
        "compress_ratio": params["ratio"],
        "topk": params["topk"],
        "M": params["M"],
        "N": params["N"],
        **CONTRACTS[params["contract"]],
        "out": _make_out(params, num_tokens, device),
    }


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's whole outputs, for inputs that no one has written to yet."""
    out = inputs["out"]
    if out is not None:
        indices, lens = out
        out = torch.as_strided(_whole(indices).clone(), indices.shape, indices.stride()), lens.clone()
    return _outputs(reference.combine(**{**inputs, "out": out}))


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole outputs."""
    return _outputs((function or combine)(**inputs))


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's functions, which take nine arguments and make their outputs (every `style`)."""
    ours = ("replay_clamp", "width_cap", "out")
    return {name: value for name, value in inputs.items() if name not in ours}


def bytes_moved(case: Case) -> int:
    """Bytes that must be read and written: the Top-K row in, the combined row and its length out."""
    params = _with_defaults(case.params)
    width = -(-(params["topk"] + params["window"]) // 128) * 128
    return int(4 * sum(params["query_lens"]) * (min(params["topk"], params["W"]) + width + 1))


def flops(case: Case) -> int:
    """None worth counting."""
    return 0


def _with_defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "contract": "common",
        "ratio": 2,
        "topk": 64,
        "window": 128,
        "N": 4096,
        "holes": 0.1,
        **dict.fromkeys(
            ("base", "shift", "spare_tokens", "spare_rows", "spare_columns", "row_gap", "topk_gap"), 0
        ),
        **dict.fromkeys(("int64", "three_dims"), False),
    }
    if "tokens" in params:
        defaults |= {"query_lens": [params["tokens"]], "seq_lens": [params["context"]]}
    merged = defaults | dict(params)
    merged.setdefault("W", merged["topk"])
    merged.setdefault("M", merged["N"] + merged["window"] + 8192)
    # what the caller gathers: the queries and the window before the first of them
    pairs = zip(merged["query_lens"], merged["seq_lens"], strict=True)
    before = merged["window"] - 1
    merged.setdefault("gather_lens", [max(min(seq, query + before), 0) for query, seq in pairs])
    return merged


def _make_topk(params: Mapping[str, Any], num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Random indices with holes: -1, or just outside `[0, N)`."""
    shape = (num_tokens, params["W"] + params["topk_gap"])
    bound = max(params["N"], 1)
    topk = torch.randint(bound, shape, generator=generator)
    wrong = torch.tensor([-1, -1, params["N"], params["N"] + 5])[torch.randint(4, shape, generator=generator)]
    topk = torch.where(torch.rand(shape, generator=generator) < params["holes"], wrong, topk)
    return topk[:, None, :] if params["three_dims"] else topk


def _shifted(vector: torch.Tensor, shift: int, device: str | torch.device) -> torch.Tensor:
    """`vector` on the device, `shift` elements off its allocation's alignment."""
    return torch.cat([torch.full((shift,), SENTINEL, dtype=vector.dtype), vector]).to(device)[shift:]


def _make_out(
    params: Mapping[str, Any], num_tokens: int, device: str | torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if params["contract"] == "rocm":
        return None
    width = -(-(params["topk"] + params["window"]) // 128) * 128 + params["spare_columns"]
    rows = num_tokens + params["spare_rows"]
    buffer = torch.full((rows, width + params["row_gap"]), SENTINEL, dtype=torch.int32, device=device)
    lens = torch.full((rows + 2,), SENTINEL, dtype=torch.int32, device=device)
    return buffer[:, :width], lens


def _whole(indices: torch.Tensor) -> torch.Tensor:
    """`indices` with its rows' gaps, `[rows, row stride]`."""
    return torch.as_strided(indices, (indices.shape[0], indices.stride(0)), indices.stride())


def _outputs(result: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    indices, lens = result
    return {"indices": _whole(indices), "lens": lens}
