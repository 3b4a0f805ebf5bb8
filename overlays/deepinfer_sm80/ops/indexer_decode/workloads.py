"""Workloads of `indexer_decode`: cases, inputs from an independent writer of pages, and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..indexer import inputs as shared
from ..spec import Case, case_maker
from . import indexer_decode, reference

OP = "indexer_decode"
TOLERANCES = {"out": shared.TOLERANCE}
# unused memory: a scale of such bytes is NaN
POISON = 0xFF
# pages of different content; the rest repeat them
_POOL = 1021


_case = case_maker(OP)
# lens: keys that the last token of each request sees
_SMOKE = (
    _case("usual", lens=[75, 130]),
    _case("no-requests", lens=[]),
    _case("empty-contexts", lens=[0, 33, 0, 1]),
    _case("one-key", lens=[1]),
    _case("page-edges", lens=[63, 64, 65, 127, 128, 129]),
    _case("blocks-of-128", lens=[130, 63, 64, 257], block=128),
    _case("blocks-of-16", lens=[50, 16, 17], block=16),
    _case("blocks-of-100", lens=[230, 99, 100, 101, 64], block=100),
    _case("blocks-of-4", lens=[9, 2], block=4),
    _case("two-tokens", lens=[75, 2, 130], next_n=2),
    _case("two-tokens-one-length", lens=[75, 2, 1, 0, 130], next_n=2, lens_form="2d"),
    _case("two-tokens-flat-lengths", lens=[75, 2, 1, 0, 130], next_n=2, lens_form="1d"),
    _case("two-tokens-any-lengths", lens=[[75, 3], [0, 130], [9, 9]], next_n=2),
    _case("three-tokens", lens=[75, 2, 130], next_n=3),
    _case("four-tokens", lens=[75, 130], next_n=4),
    _case("flat-lengths", lens=[75, 130], lens_form="1d"),
    _case("negative-lengths", lens=[[-5], [20], [-(2**31)]]),
    _case("spare-rows", lens=[75, 20], spare_rows=3),
    _case("longer-than-the-output", lens=[90, 20], width=70),
    _case("longer-than-the-table", lens=[[200], [20]], table_pages=2),
    _case("all-codes", lens=[130], kind="all"),
    _case("large", lens=[70], kind="large"),
    _case("zero", lens=[70], kind="zero"),
    _case("subnormal", lens=[70], kind="subnormal"),
    _case("any-scale", lens=[75, 130], scale_kind="any"),
    _case("pages-of-other-layers-between", lens=[75, 130], page_gap=5 * 8448 + 576),
    _case("table-and-rows-apart", lens=[75, 130], table_gap=3, out_stride=301, spare=16, cache_shift=16),
    _case("float8", lens=[40], float8=True),
    _case("longer-output", lens=[40], width=300),
)  # fmt: skip
_FULL = (
    *(
        _case(f"{requests}-requests-{n}-tokens-block-{block}", "full", lens=[1000 * i + 7 for i in range(requests)], next_n=n, block=block,
              gpu_only=True)
        for requests, n, block in ((1, 1, 64), (5, 1, 128), (24, 1, 64), (24, 2, 128), (7, 2, 64), (3, 6, 64), (200, 1, 64))
    ),
    _case("all-codes-24-requests", "full", lens=[5000] * 24, kind="all", scale_kind="any", gpu_only=True),
    _case("one-long-many-empty", "full", lens=[0] * 30 + [50_000], gpu_only=True),
    _case("131072-keys", "full", lens=[131_072] * 4, gpu_only=True, memory_bytes=1 << 30),
    _case("1M-keys", "full", lens=[1_048_576, 1_048_575], gpu_only=True, memory_bytes=3 << 30),
    _case("1M-keys-two-tokens", "full", lens=[1_048_576], next_n=2, block=128, gpu_only=True, memory_bytes=3 << 30),
    _case("cache-over-4GiB", "full", lens=[3000, 70], spare_pages=600_000, gpu_only=True, memory_bytes=8 << 30),
    _case("page-stride-over-2^31", "full", lens=[100, 70], page_gap=1 << 31, gpu_only=True, memory_bytes=18 << 30),
    _case("out-over-2^31-elements", "full", lens=[100, 70, 1], out_stride=(1 << 30) + 4, gpu_only=True, memory_bytes=60 << 30),
)  # fmt: skip


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """One token for each request, contexts of one length."""
    return tuple(
        _case(f"{tokens}-requests-{keys}-keys", "bench", tokens=tokens, keys=keys, gpu_only=True)
        for tokens in (1, 4, 24)
        for keys in (8192, 131_072)
    )


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `indexer_decode`, made from the case's seed; `out` is filled with SENTINEL."""
    params, generator = case.params, torch.Generator().manual_seed(case.seed)
    lens, next_n = _lens(params), params.get("next_n", 1)
    spare_rows = params.get("spare_rows", 0)
    longest = [max([*row, 0]) for row in lens]
    q, weights = shared.queries(
        len(lens) * next_n, params.get("kind", "usual"), generator, spare=params.get("spare", 0)
    )
    q = _strided_to(q, device).unflatten(0, (len(lens), next_n))
    cache, table = _write_cache(params, longest, generator, device)
    width = params.get("width", max([*longest, 1]) + 5)
    return {
        "q": q.view(torch.float8_e4m3fn) if params.get("float8") else q,
        "kv_cache": cache,
        "weights": _strided_to(weights, device),
        "context_lens": _lens_tensor(params, lens, spare_rows).to(device),
        "block_table": table,
        "out": shared.output(len(lens) * next_n + spare_rows, width, params, device),
    }


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's whole output, not rounded, and its error measure as `out:bound`."""
    logits, bounds, out, bound = shared.oracle(inputs["out"])
    reference.indexer_decode(**{**inputs, "out": out}, bound=bound)
    return {"out": logits, "out:bound": bounds}


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole output."""
    (function or indexer_decode)(**inputs)
    return {"out": shared.whole(inputs["out"])}


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's `fp8_fp4_paged_mqa_logits` (every `style`), which returns what ours writes."""
    return {
        "q": (inputs["q"].view(torch.float8_e4m3fn), None),
        "kv_cache": inputs["kv_cache"].unsqueeze(-2),
        "weights": inputs["weights"],
        "context_lens": inputs["context_lens"],
        "block_tables": inputs["block_table"],
        # how DeepGEMM shares the work out
        "schedule_metadata": None,
        "max_model_len": inputs["out"].shape[1],
        "clean_logits": False,
    }


def bytes_moved(case: Case) -> int:
    """A record per key and request in, a float32 per row and key out."""
    lens = _lens(case.params)
    records = sum(max([*row, 0]) for row in lens)
    return records * 132 + 4 * _pairs(case) + len(lens) * case.params.get("next_n", 1) * 32 * 132


def flops(case: Case) -> int:
    """A dot of 128 for each row, head and key."""
    return 2 * 32 * 128 * _pairs(case)


def _pairs(case: Case) -> int:
    return sum(max(length, 0) for row in _lens(case.params) for length in row)


def _lens(params: Mapping[str, Any]) -> list[list[int]]:
    """How many keys each token of each request sees."""
    if "tokens" in params:
        return [[params["keys"]]] * params["tokens"]
    next_n = params.get("next_n", 1)
    return [
        list(one)
        if isinstance(one, (list, tuple))
        else [one - (next_n - 1 - token) for token in range(next_n)]
        for one in params["lens"]
    ]


def _lens_tensor(params: Mapping[str, Any], lens: list[list[int]], spare_rows: int) -> torch.Tensor:
    """In the form of the case; rows that belong to no request hold what would be seen."""
    form, next_n = params.get("lens_form", "per-token"), params.get("next_n", 1)
    rows = torch.tensor([*lens, *[[7] * next_n] * spare_rows], dtype=torch.int32).reshape(-1, next_n)
    if form == "per-token":
        return rows
    return rows[:, -1:].contiguous() if form == "2d" else rows[:, -1].contiguous()


def _write_cache(
    params: Mapping[str, Any], lens: list[int], generator: torch.Generator, device: str | torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with every request's records on shuffled pages, and its block table."""
    block = params.get("block", 64)
    limit = params.get("table_pages")
    needed = [-(-length // block) if limit is None else limit for length in lens]
    count = sum(needed) + 3 + params.get("spare_pages", 0)
    shuffled = torch.randperm(count, generator=generator)
    width = max(needed, default=0) + (0 if limit else 1)
    table = torch.full((len(lens), width + params.get("table_gap", 0)), int(shuffled[-1]), dtype=torch.int32)
    taken = 0
    for request, pages in enumerate(needed):
        table[request, :pages] = shuffled[taken : taken + pages]
        taken += pages
    cache = _memory(params, count, block, device)
    _fill(cache, shuffled[:taken], params, generator)
    last = [
        (table[i, length // block], length % block)
        for i, length in enumerate(lens)
        if length % block and not limit
    ]
    for page, used in last:
        _wipe(cache, int(page), used)
    moved = table.to(device)
    return cache, moved[:, :width]


def _memory(params: Mapping[str, Any], count: int, block: int, device: str | torch.device) -> torch.Tensor:
    stride, shift = -(-block * 132 // 64) * 64 + params.get("page_gap", 0), params.get("cache_shift", 0)
    memory = torch.full((count * stride + shift,), POISON, dtype=torch.uint8, device=device)
    return torch.as_strided(memory, (count, block, 132), (stride, 132, 1), shift)


def _flat(cache: torch.Tensor) -> torch.Tensor:
    """Each page as bytes."""
    shape = (cache.shape[0], cache.shape[1] * 132)
    return torch.as_strided(cache, shape, (cache.stride(0), 1), cache.storage_offset())


def _fill(
    cache: torch.Tensor, pages: torch.Tensor, params: Mapping[str, Any], generator: torch.Generator
) -> None:
    """Records into `pages`: all codes of a page first, then all its scales."""
    block, pool = cache.shape[1], min(len(pages), _POOL)
    codes = shared.codes((pool, block * 128), params.get("kind", "usual"), generator)
    scales = shared.scales(pool * block, params.get("scale_kind", "usual"), generator)
    made = torch.cat([codes, scales.view(torch.uint8).view(pool, block * 4)], dim=1).to(cache.device)
    flat = _flat(cache)
    for first in range(0, len(pages), max(pool, 1)):
        part = pages[first : first + pool].to(cache.device)
        flat.index_copy_(0, part, made[: len(part)])


def _wipe(cache: torch.Tensor, page: int, used: int) -> None:
    """Slots that no context reaches."""
    flat, block = _flat(cache)[page], cache.shape[1]
    flat[used * 128 : block * 128] = POISON
    flat[block * 128 + used * 4 :] = POISON


def _strided_to(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """On the device with the strides that it has."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)
