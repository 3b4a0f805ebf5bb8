"""Workloads of `gather`: cases, inputs from an independent writer of pages, and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..spec import Case, Tolerance, case_maker
from . import gather, reference

OP = "gather"
TOLERANCES = {"out": Tolerance()}
# fills whatever the op must not touch: finite, so that a NaN written over it shows
SENTINEL = -24576.0
# fills pads, unused slots and spare pages: NaN as codes, as scales and as bf16
POISON = 0xFF
_case = case_maker(OP)

_SMOKE = (
    _case("one-row", tokens=1),
    _case("odd-length", tokens=147, block_size=64),
    _case("every-code-at-every-scale", tokens=147, codes="all"),
    _case("what-stock-writes", tokens=[70, 40], codes="usual"),
    _case("page-boundary", tokens=[64, 65, 63], block_size=64),
    _case("starts-inside-a-page", tokens=[100, 70], gather_lens=[37, 5], block_size=32),
    _case("block-37", tokens=90, block_size=37),
    _case("block-1", tokens=9, block_size=1),
    _case("swa-after-compressed", tokens=[40, 150], gather_lens=[40, 128], block_size=32, offset=11),
    _case("zero-lengths", tokens=[0, 33, 50], gather_lens=[0, 33, 0]),
    _case("no-requests", tokens=[]),
    _case("asks-for-more-than-there-is", tokens=[20, 40], gather_lens=[29, 40]),
    _case("reaches-past-out", tokens=[30, 50], rows=33, offset=4),
    _case("hint-too-small", tokens=[150, 90], max_gather_len=1),
    # so few workers that one gets to a page before another has finished the tile before it
    _case("block-37-three-workers", tokens=90, block_size=37, max_gather_len=0),
    _case("no-hint", tokens=[70, 20], max_gather_len=None, rows=900),
    _case("pages-of-other-layers-between", tokens=70, page_gap=5 * 576),
    _case("odd-page-stride", tokens=70, page_gap=3),
    _case("odd-cache-address", tokens=40, cache_shift=1),
    _case("padded-rows", tokens=[30, 30], row_stride=520),
    _case("requests-apart", tokens=[30, 30], request_stride=50 * 512),
    _case("odd-row-stride", tokens=[30, 30], row_stride=515),
    _case("odd-out-address", tokens=30, out_shift=1),
    _case("strided-block-table", tokens=[70, 40], table_gap=13),
)
_FULL = (
    _case("16384-tokens", "full", tokens=16384, gpu_only=True),
    _case("131072-tokens", "full", tokens=131072, gpu_only=True, memory_bytes=1 << 30),
    _case("block-128-four-requests", "full", tokens=[5000, 1, 129, 2048], block_size=128, gpu_only=True),
    _case("block-100-four-requests", "full", tokens=[5000, 1, 129, 2048], block_size=100, gpu_only=True),
    _case("300-requests", "full", tokens=[7 * i % 401 for i in range(300)], gpu_only=True),
    _case("no-hint-long-buffer", "full", tokens=[3000] * 4, max_gather_len=None, rows=60_000, gpu_only=True,
          memory_bytes=2 << 30),
    _case("cache-over-2GiB", "full", tokens=4000, num_blocks=60_000, gpu_only=True, memory_bytes=3 << 30),
    _case("out-over-4GiB", "full", tokens=[70] * 2, request_stride=(1 << 31) + 512, gpu_only=True, memory_bytes=5 << 30),
)  # fmt: skip


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """One request, block size 64, shuffled pages; codes and scales that stock reads as we do, or it would not be timed."""
    lengths = (1024, 4096, 16384, 49152, 131072)
    shared: dict[str, Any] = {"block_size": 64, "codes": "usual", "gpu_only": True}
    return tuple(_case(f"{n}-tokens", "bench", tokens=n, **shared) for n in lengths)


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `gather`, made from the case's seed; `out` is filled with SENTINEL."""
    params = case.params
    generator = torch.Generator().manual_seed(case.seed)
    seq_lens, gather_lens = _lengths(params)
    block_size, offset = params.get("block_size", 64), params.get("offset", 0)
    lens = seq_lens if gather_lens is None else gather_lens
    longest = max(lens, default=0)
    k_cache, block_table = _write_cache(params, seq_lens, block_size, generator, device)
    return {
        "out": _make_out(params, len(seq_lens), params.get("rows", offset + longest + 3), device),
        "k_cache": k_cache,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=device),
        "gather_lens": None
        if gather_lens is None
        else torch.tensor(gather_lens, dtype=torch.int32, device=device),
        "block_table": block_table,
        "block_size": block_size,
        "offset": offset,
        "max_gather_len": params.get("max_gather_len", longest),
    }


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's whole output buffer, for inputs that no one has written to yet."""
    out = inputs["out"]
    copy = _whole(out).clone(memory_format=torch.contiguous_format)
    reference.gather(**{**inputs, "out": copy[:, :, :512]})
    return {"out": copy}


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole output buffer."""
    (function or gather)(**inputs)
    return {"out": _whole(inputs["out"])}


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's function: `stock` with the hint, `stock-0.30-grid` without."""
    hint = None if style == "stock-0.30-grid" else inputs["max_gather_len"]
    return {**inputs, "use_fnuz": False, "max_gather_len": hint}


def bytes_moved(case: Case) -> int:
    """Bytes that must be read and written: a record in, a row of 512 bf16 out."""
    return _gathered(case) * (584 + 1024)


def flops(case: Case) -> int:
    """One product per e4m3 code."""
    return _gathered(case) * 448


def _lengths(params: Mapping[str, Any]) -> tuple[list[int], list[int] | None]:
    tokens = params["tokens"]
    return ([tokens] if isinstance(tokens, int) else list(tokens)), params.get("gather_lens")


def _gathered(case: Case) -> int:
    seq_lens, gather_lens = _lengths(case.params)
    return sum(seq_lens if gather_lens is None else gather_lens)


def _make_out(
    params: Mapping[str, Any], num_reqs: int, rows: int, device: str | torch.device
) -> torch.Tensor:
    row_stride, shift = params.get("row_stride", 512), params.get("out_shift", 0)
    request_stride = params.get("request_stride", rows * row_stride)
    # the last request ends with its rows
    size = (num_reqs - 1) * request_stride + rows * row_stride + shift if num_reqs else shift
    buffer = torch.full((size,), SENTINEL, dtype=torch.bfloat16, device=device)
    return torch.as_strided(buffer, (num_reqs, rows, 512), (request_stride, row_stride, 1), shift)


def _whole(out: torch.Tensor) -> torch.Tensor:
    """`out` with its rows' gaps, `[num_reqs, rows, row stride]`."""
    shape = (out.shape[0], out.shape[1], out.stride(1))
    return torch.as_strided(out, shape, out.stride())


def _write_cache(
    params: Mapping[str, Any],
    seq_lens: list[int],
    block_size: int,
    generator: torch.Generator,
    device: str | torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with every request's records on shuffled pages, and its block table."""
    pages_of = [-(-n // block_size) for n in seq_lens]
    num_blocks = params.get("num_blocks", sum(pages_of) + 3)
    stride = -(-block_size * 584 // 576) * 576 + params.get("page_gap", 0)
    shift = params.get("cache_shift", 0)
    memory = torch.full((num_blocks * stride + shift,), POISON, dtype=torch.uint8, device=device)
    shuffled = torch.randperm(num_blocks, generator=generator)
    spare = int(shuffled[-1])
    width = max(pages_of, default=0) + 1
    table = torch.full((len(seq_lens), width + params.get("table_gap", 0)), spare, dtype=torch.int32)
    taken = 0
    for request, (length, count) in enumerate(zip(seq_lens, pages_of, strict=True)):
        pages = shuffled[taken : taken + count]
        taken += count
        table[request, :count] = pages
        records = _make_records(length, params.get("codes", "random"), generator)
        records = tuple(part.to(device) for part in records)
        for index, page in enumerate(pages.tolist()):
            first = index * block_size
            start = shift + page * stride
            _write_page(
                memory[start : start + stride],
                block_size,
                [part[first : first + block_size] for part in records],
            )
    cache = torch.as_strided(memory, (num_blocks, block_size, 584), (stride, 584, 1), shift)
    return cache, table.to(device)[:, :width]


def _write_page(page: torch.Tensor, block_size: int, records: list[torch.Tensor]) -> None:
    """Puts records into the first slots of a page: all data rows first, then all scale rows."""
    codes, scales, tails = records
    data, rest = page[: block_size * 576], page[block_size * 576 :]
    data.view(block_size, 576)[: len(codes), :448] = codes
    data.view(block_size, 576)[: len(codes), 448:] = tails
    rest[: block_size * 8].view(block_size, 8)[: len(codes), :7] = scales


def _make_records(
    count: int, kind: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """uint8 codes `[count, 448]`, scales `[count, 7]` and tails `[count, 128]`: random, those stock writes, or every pair."""
    if kind == "all":
        quarter = torch.arange(count * 7)
        scales = (quarter // 4).clamp(max=255).view(count, 7)
        codes = (quarter[:, None] % 4 * 64 + torch.arange(64)).view(count, 448)
    else:
        codes = torch.randint(256, (count, 448), generator=generator)
        # the scales of stock's writers; unless only those are asked for, now and then any other
        scales = torch.randint(105, 140, (count, 7), generator=generator)
        if kind == "usual":
            codes[codes & 0x7F == 0x7F] = 0
        else:
            rare = torch.rand((count, 7), generator=generator) < 0.1
            scales = torch.where(rare, torch.randint(256, (count, 7), generator=generator), scales)
    tails = torch.randint(256, (count, 128), generator=generator)
    return codes.to(torch.uint8), scales.to(torch.uint8), tails.to(torch.uint8)
