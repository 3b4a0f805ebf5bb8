"""Workloads of `indexer_prefill`: cases, inputs, and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..indexer import inputs as shared
from ..spec import Case, case_maker
from . import indexer_prefill, reference

OP = "indexer_prefill"
TOLERANCES = {"out": shared.TOLERANCE}
_BIG = 0x7FFFFFFF


_case = case_maker(OP)
# requests: (query tokens, states of the whole request) each; a row sees the states up to its own position
_SMOKE = (
    _case("usual", requests=[(11, 75)]),
    _case("usual-compressed", requests=[(11, 75)], compressed=True),
    _case("no-tokens", requests=[]),
    _case("no-keys", requests=[(3, 0)]),
    _case("no-keys-wide", requests=[(3, 0)], width=9),
    _case("one-token-one-key", requests=[(1, 1)]),
    _case("two-requests", requests=[(5, 40), (6, 37)]),
    _case("two-requests-compressed", requests=[(5, 40), (6, 37)], compressed=True),
    _case("many-requests-in-a-tile", requests=[(1, 9), (2, 33), (1, 0), (3, 70), (1, 1), (2, 2), (3, 31)], compressed=True),
    _case("many-requests-in-a-tile-absolute", requests=[(1, 9), (2, 33), (1, 0), (3, 70), (1, 1), (2, 2), (3, 31)]),
    _case("whole-prompt", requests=[(35, 35)], compressed=True),
    _case("ratio-2", requests=[(21, 10)], ratio=2),
    _case("rows-without-keys", bounds=[(0, 0), (5, 5), (7, 3), (0, 40), (39, 40), (40, 40), (3, 4)], keys=40),
    _case("rows-without-keys-compressed", bounds=[(0, 0), (5, 5), (7, 3), (0, 40), (39, 40)], keys=40, compressed=True),
    _case("bounds-outside-the-keys", bounds=[(-3, 9), (0, 99), (50, 60), (-9, -1), (-_BIG, _BIG)], keys=40),
    _case("bounds-outside-compressed", bounds=[(-3, 9), (0, 99), (50, 60), (7, _BIG)], keys=40, compressed=True),
    _case("out-narrower-than-rows", requests=[(6, 50)], width=33),
    _case("out-narrower-compressed", requests=[(4, 20), (6, 50)], width=33, compressed=True),
    _case("out-wider-than-rows", requests=[(6, 50)], width=64, compressed=True),
    _case("first-rows-far-apart", bounds=[(0, 3), (90, 97)], keys=97, compressed=True, width=8),
    _case("all-codes", requests=[(9, 66)], kind="all"),
    _case("large", requests=[(5, 40)], kind="large"),
    _case("zero", requests=[(5, 40)], kind="zero"),
    _case("subnormal", requests=[(5, 40)], kind="subnormal"),
    _case("any-scale", requests=[(9, 66)], scale_kind="any"),
    _case("rows-apart", requests=[(9, 66)], spare=16, key_stride=144, out_stride=77),
    _case("float8", requests=[(5, 40)], float8=True),
    _case("no-keys-several-splits", bounds=[(0, 0), (5, 5), (9, 2)], keys=40, width=2200),
    _case("several-splits", requests=[(3, 2200)], compressed=True),
)  # fmt: skip
_FULL = (
    *(
        _case(f"{tokens}-tokens-{keys}-keys{'-compressed' * compressed}", "full", requests=[(tokens, keys)], compressed=compressed,
              gpu_only=True)
        for tokens, keys in ((1, 31), (7, 32), (8, 33), (9, 1000), (128, 4096), (129, 4097), (1000, 3001), (2048, 8192))
        for compressed in (False, True)
    ),
    _case("mixed-requests", "full", requests=[(100, 5000), (1, 3), (300, 300), (7, 12_000), (64, 64)], gpu_only=True),
    _case("mixed-requests-compressed", "full", requests=[(100, 5000), (1, 3), (300, 300), (7, 12_000), (64, 64)], compressed=True,
          gpu_only=True),
    _case("all-codes-512-tokens", "full", requests=[(512, 2048)], kind="all", scale_kind="any", gpu_only=True),
    _case("large-64-tokens", "full", requests=[(64, 4096)], kind="large", gpu_only=True),
    _case("1M-keys", "full", requests=[(9, 1_048_576)], gpu_only=True, memory_bytes=2 << 30),
    _case("1M-keys-compressed", "full", requests=[(120, 1_048_576)], compressed=True, gpu_only=True, memory_bytes=10 << 30),
    _case("1M-keys-of-two-requests", "full", requests=[(3, 600_000), (6, 448_576)], compressed=True, gpu_only=True,
          memory_bytes=2 << 30),
    _case("out-over-2^31-elements", "full", requests=[(4, 100)], out_stride=(1 << 30) + 4, gpu_only=True, memory_bytes=60 << 30),
    _case("keys-over-2^31-bytes", "full", requests=[(2, 40_000)], key_stride=65_536, gpu_only=True, memory_bytes=6 << 30),
)  # fmt: skip


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """The last 2,048 tokens of one prompt."""
    return tuple(
        _case(f"2048-tokens-{keys}-keys", "bench", tokens=2048, keys=keys, compressed=True, gpu_only=True)
        for keys in (8192, 65_536)
    )


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `indexer_prefill`, made from the case's seed; `out` is filled with SENTINEL."""
    params, generator = case.params, torch.Generator().manual_seed(case.seed)
    bounds, keys, width = _bounds(params)
    kind = params.get("kind", "usual")
    q, weights = shared.queries(len(bounds), kind, generator, spare=params.get("spare", 0))
    k = shared.codes((keys, 128), kind, generator).to(device)
    k_scale = shared.scales(keys, params.get("scale_kind", "usual"), generator)
    stride = params.get("key_stride", 128)
    if stride != 128:
        apart = torch.full((keys * stride,), 0xFF, dtype=torch.uint8, device=device).view(keys, stride)[
            :, :128
        ]
        k = apart.copy_(k)
    q = _strided_to(q, device)
    if params.get("float8"):
        q, k = q.view(torch.float8_e4m3fn), k.view(torch.float8_e4m3fn)
    return {
        "q": q,
        "k": k,
        "k_scale": k_scale.to(device),
        "weights": _strided_to(weights, device),
        "ks": torch.tensor([begin for begin, _end in bounds], dtype=torch.int32, device=device),
        "ke": torch.tensor([end for _begin, end in bounds], dtype=torch.int32, device=device),
        "out": shared.output(len(bounds), width, params, device),
        "compressed": params.get("compressed", False),
    }


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's whole output, not rounded, and its error measure as `out:bound`."""
    logits, bounds, out, bound = shared.oracle(inputs["out"])
    reference.indexer_prefill(**{**inputs, "out": out}, bound=bound)
    return {"out": logits, "out:bound": bounds}


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole output."""
    (function or indexer_prefill)(**inputs)
    return {"out": shared.whole(inputs["out"])}


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's `fp8_fp4_mqa_logits` (every `style`), which returns what ours writes."""
    return {
        "q": (inputs["q"].view(torch.float8_e4m3fn), None),
        "kv": (inputs["k"].view(torch.float8_e4m3fn), inputs["k_scale"]),
        "weights": inputs["weights"],
        "cu_seqlen_ks": inputs["ks"],
        "cu_seqlen_ke": inputs["ke"],
        "clean_logits": False,
        "max_seqlen_k": inputs["out"].shape[1],
    }


def bytes_moved(case: Case) -> int:
    """Codes, scales and weights in, a float32 per row and key out."""
    bounds, keys, _width = _bounds(case.params)
    return len(bounds) * 32 * (128 + 4) + keys * 132 + 4 * _pairs(case)


def flops(case: Case) -> int:
    """A dot of 128 for each row, head and key."""
    return 2 * 32 * 128 * _pairs(case)


def _pairs(case: Case) -> int:
    bounds, keys, _width = _bounds(case.params)
    return sum(max(min(end, keys) - max(begin, 0), 0) for begin, end in bounds)


def _bounds(params: Mapping[str, Any]) -> tuple[list[tuple[int, int]], int, int]:
    """First and last key of each row, how many keys there are, and the output's width."""
    if "tokens" in params:
        params = {**params, "requests": [(params["tokens"], params["keys"])]}
    ratio, found, keys, longest = params.get("ratio", 1), [], 0, 0
    for tokens, states in params.get("requests", ()):
        before = states * ratio - tokens
        found += [(keys, keys + max((before + token + 1) // ratio, 0)) for token in range(tokens)]
        keys, longest = keys + states, max(longest, states)
    if "bounds" in params:
        found, keys = [tuple(pair) for pair in params["bounds"]], params["keys"]
        longest = keys
    return found, keys, params.get("width", longest if params.get("compressed") else keys)


def _strided_to(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """On the device with the strides that it has."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)
