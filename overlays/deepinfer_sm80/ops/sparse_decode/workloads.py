"""Workloads of `sparse_decode`: cases, inputs from an independent writer of pages, and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import sparse_inputs
from ..sparse_inputs import POISON, SCALE, SIZES, Rows
from ..spec import Case, case_maker
from . import reference, sparse_decode
from .pages import Cache, write_cache

OP = "sparse_decode"
TOLERANCES = sparse_inputs.TOLERANCES
_case = case_maker(OP)

_SMOKE = (
    _case("usual", tokens=2, heads=16, swa=21, topk=50),
    _case("rotated", tokens=2, heads=16, swa=21, topk=50, rotated=True),
    _case("no-tokens", tokens=0, heads=16, swa=4, topk=4),
    _case("swa-only", tokens=2, heads=16, swa=40),
    _case("swa-only-rotated", tokens=2, heads=16, swa=40, rotated=True),
    _case("extra-only", tokens=2, heads=16, swa=0, topk=40),
    _case("extra-lists-empty", tokens=2, heads=16, swa=19, topk=0),
    _case("flat", tokens=1, heads=16, swa=21, topk=70, kind="flat"),
    _case("peaked", tokens=1, heads=16, swa=21, topk=70, kind="peaked"),
    _case("best-row-last", tokens=1, heads=16, swa=60, topk=90, kind="peaked", order="ascending"),
    _case("best-row-first", tokens=1, heads=16, swa=60, topk=90, kind="peaked", order="descending"),
    _case("one-row", tokens=2, heads=16, swa=1, topk=0),
    _case("one-row-of-extra", tokens=2, heads=16, swa=0, topk=1, rotated=True),
    _case("one-row-no-sink", tokens=2, heads=16, swa=1, sink="none"),
    _case("two-rows", tokens=2, heads=16, swa=1, topk=1),
    _case("sink-dominated", tokens=2, heads=16, swa=21, topk=20, sink="large"),
    _case("no-sink", tokens=1, heads=16, swa=21, topk=50, sink="none"),
    _case("sink-minus-infinity", tokens=3, heads=16, swa=[0, 20, 1], topk=[0, 13, 0], sink="minus-infinity"),
    _case("long-sink", tokens=1, heads=16, swa=20, sink="long"),
    _case("large-scores", tokens=1, heads=16, swa=21, topk=50, kind="large"),
    _case("large-values", tokens=1, heads=16, swa=21, topk=50, kind="tall"),
    _case("no-rows", tokens=4, heads=16, swa=[0, 9, 0, 0], topk=[0, 0, 33, 0], rotated=True),
    _case("no-rows-no-sink", tokens=2, heads=16, swa=[0, 9], topk=[0, 0], sink="none"),
    _case("all-invalid", tokens=2, heads=16, swa=21, topk=40, holes=1.0),
    _case("all-invalid-no-sink", tokens=2, heads=16, swa=21, topk=40, holes=1.0, sink="none"),
    _case("holes", tokens=2, heads=16, swa=40, topk=80, holes=0.4),
    _case("swa-all-invalid", tokens=1, heads=16, swa=70, topk=40, holes="swa", sink="none"),
    _case("extra-all-invalid", tokens=1, heads=16, swa=40, topk=70, holes="topk"),
    _case("ragged", tokens=6, heads=8, swa=[0, 1, 15, 16, 17, 33], topk=[70, 31, 32, 33, 0, 1]),
    _case("from-the-middle", tokens=2, heads=16, swa=11, topk=12, index_base=13),
    _case("nan", tokens=2, heads=16, swa=21, topk=50, nan=0.02),
    _case("nan-everywhere", tokens=1, heads=16, swa=5, topk=9, nan=1.0),
    _case("every-scale-every-code", tokens=1, heads=16, swa=40, topk=70, kind="codes"),
    _case("every-scale-alone", tokens=22, heads=8, swa=1, kind="codes", apart=True, sink="none"),
    _case("scales-0-to-104", tokens=15, heads=8, swa=1, topk=1, kind="small-scales", apart=True, sink="none"),
    _case("8-heads", tokens=2, heads=8, swa=10, topk=20),
    _case("12-heads", tokens=1, heads=12, swa=10, topk=20, rotated=True),
    _case("1-head", tokens=1, heads=1, swa=10, topk=20),
    _case("32-heads", tokens=1, heads=32, swa=10, topk=20, rotated=True),
    _case("40-heads", tokens=1, heads=40, swa=10, topk=20),
    _case("72-heads", tokens=2, heads=72, swa=10, topk=20, rotated=True),
    _case("128-heads", tokens=1, heads=128, swa=10, topk=20),
    _case("pages-of-other-layers-between", tokens=2, heads=16, swa=20, topk=40, swa_gap=3 * 19_008, gap=5 * 576),
    _case("odd-page-strides", tokens=2, heads=16, swa=20, topk=40, swa_gap=3, gap=1),
    _case("odd-cache-address", tokens=2, heads=16, swa=20, topk=40, cache_shift=1),
    _case("blocks-of-37-and-1", tokens=2, heads=16, swa=20, topk=40, swa_block=37, block=1),
    _case("padded-rows", tokens=2, heads=16, swa=20, topk=20, q_stride=520, out_stride=528),
    _case("tokens-apart", tokens=2, heads=16, swa=20, topk=20, spare_heads=3, rotated=True),
    _case("odd-strides", tokens=2, heads=16, swa=20, topk=20, q_stride=513, out_stride=517, rotated=True),
    _case("odd-addresses", tokens=2, heads=16, swa=20, topk=20, q_shift=3, out_shift=1),
    _case("padded-cos-sin", tokens=2, heads=16, swa=20, topk=20, rotated=True, cos_sin_stride=71),
    _case("unit-normal-512-rows", tokens=1, heads=64, swa=128, topk=384, sink="none", max_abs=4.8e-3),
)  # fmt: skip
_FULL = (
    _case("unit-normal-64-heads", "full", tokens=24, heads=64, swa=128, topk=384, sink="none", max_abs=4.8e-3, gpu_only=True),
    _case("unit-normal-with-sink", "full", tokens=96, heads=64, swa=128, topk=384, max_abs=4.8e-3, rotated=True, gpu_only=True),
    *(
        _case(f"{heads}-heads-{tokens}-tokens", "full", tokens=tokens, heads=heads, swa=128, topk=512, rotated=True, gpu_only=True)
        for tokens, heads in ((1, 64), (1, 32), (2, 128), (3, 8), (6, 64), (7, 24), (13, 16), (24, 32), (24, 64), (33, 100), (50, 40),
                              (65, 128), (96, 64), (97, 32), (200, 64), (200, 16))
    ),
    *(
        _case(f"{kind}-{order}-640-rows", "full", tokens=24, heads=64, swa=128, topk=512, kind=kind, order=order, gpu_only=True)
        for kind in ("flat", "peaked", "large", "tall")
        for order in ("random", "ascending", "descending")
    ),
    _case("ragged-200-tokens", "full", tokens=200, heads=64, swa=(0, 128), topk=(0, 2000), holes=0.1, gpu_only=True),
    _case("ragged-6-tokens", "full", tokens=6, heads=64, swa=(0, 128), topk=(0, 2000), rotated=True, gpu_only=True),
    _case("one-long-many-empty", "full", tokens=60, heads=64, swa=[0] * 59 + [128], topk=[0] * 59 + [2000], gpu_only=True),
    _case("swa-only-96-tokens", "full", tokens=96, heads=64, swa=128, rotated=True, gpu_only=True),
    _case("extra-only-24-tokens", "full", tokens=24, heads=64, swa=0, topk=512, gpu_only=True),
    _case("sink-dominated-640-rows", "full", tokens=24, heads=64, swa=128, topk=512, sink="large", gpu_only=True),
    _case("one-row-200-tokens", "full", tokens=200, heads=64, swa=1, topk=0, rotated=True, gpu_only=True),
    _case("two-rows-24-tokens", "full", tokens=24, heads=64, swa=1, topk=1, gpu_only=True),
    _case("block-128", "full", tokens=24, heads=64, swa=128, topk=512, block=128, rotated=True, gpu_only=True),
    _case("nan-640-rows", "full", tokens=24, heads=64, swa=128, topk=512, nan=0.01, gpu_only=True),
    _case("codes-300-tokens", "full", tokens=300, heads=16, swa=40, topk=80, kind="codes", gpu_only=True),
    _case("codes-alone-256-tokens", "full", tokens=256, heads=64, swa=1, kind="codes", apart=True, sink="none", gpu_only=True),
    _case("odd-everything-24-tokens", "full", tokens=24, heads=64, swa=128, topk=512, swa_gap=3, gap=5, cache_shift=1, q_stride=513,
          out_stride=517, q_shift=1, out_shift=1, rotated=True, gpu_only=True),
    _case("caches-over-2GiB", "full", tokens=24, heads=64, swa=128, topk=512, swa_rows=4_000_000, rows=4_000_000, rotated=True,
          gpu_only=True, memory_bytes=6 << 30),
    _case("page-stride-over-2^31", "full", tokens=3, heads=16, swa=20, topk=40, swa_rows=64, rows=128, swa_gap=1 << 31, gap=1 << 31,
          gpu_only=True, memory_bytes=11 << 30),
    _case("out-over-2^31-elements", "full", tokens=3, heads=16, swa=20, topk=40, spare_heads=(1 << 21) + 5, rotated=True,
          gpu_only=True, memory_bytes=15 << 30),
    _case("positions-to-1M", "full", tokens=24, heads=64, swa=128, topk=512, rotated=True, max_position=1 << 20, gpu_only=True),
)  # fmt: skip


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """128 window rows and 512 Top-K rows per token, of 1,024 compressed rows per token (4,096 at least); not rotated, as stock."""
    return tuple(
        _case(
            f"{tokens}-tokens-{heads}-heads", "bench", tokens=tokens, heads=heads, swa=128, topk=512,
            swa_rows=128 * tokens, rows=max(4096, 1024 * tokens), gpu_only=True,
        )
        for heads in (64, 32)
        for tokens in (1, 6, 24, 96)
    )  # fmt: skip


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `sparse_decode`, made from the case's seed; `out` and unused memory are NaN."""
    params = _with_defaults(case.params)
    # vLLM's lists end where the widest rows of all tokens would
    params["spare_slots"] = 0 if case.suite == "bench" else 5
    generator = torch.Generator().manual_seed(case.seed)
    q, direction = _make_q(params, generator)
    swa = _make_list(params, "swa", params["swa"], direction, generator)
    room = params["heads"] + params["spare_heads"]
    inputs: dict[str, Any] = {
        "q": sparse_inputs.strided(q, room, params["q_stride"], params["q_shift"], device),
        "out": sparse_inputs.strided(
            torch.full_like(q, POISON), room, params["out_stride"], params["out_shift"], device
        ),
        **_on_device("swa", swa, params, params["swa_gap"], device),
        "scale": SCALE,
        "sink": sparse_inputs.make_sink(params["sink"], params["heads"], generator, device),
    }
    if params["topk"] is not None:
        extra = _make_list(params, "topk", params["topk"], direction, generator)
        inputs |= _on_device("extra", extra, params, params["gap"], device)
    if params["rotated"]:
        inputs |= _make_rotation(params, generator, device)
    return inputs


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's whole output, not rounded, and its error measure as `out:bound`."""
    return sparse_inputs.expected(reference.attend, inputs)


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole output."""
    (function or sparse_decode)(**inputs)
    return {"out": sparse_inputs.whole(inputs["out"])}


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's `rocm_sparse_attn_decode` (every `style`)."""
    extra = inputs.get("extra_cache")
    return {
        "q": inputs["q"],
        "kv_cache": extra,
        "swa_k_cache": inputs["swa_cache"],
        "swa_only": extra is None,
        "topk_indices": None,
        "topk_lens": None,
        # only looked at for its shape where the ragged lists are given
        "swa_indices": inputs["swa_indptr"][:-1, None, None],
        "swa_lens": None,
        "swa_ragged_indices": inputs["swa_indices"],
        "swa_ragged_indptr": inputs["swa_indptr"],
        "topk_ragged_indices": inputs.get("extra_indices"),
        "topk_ragged_indptr": inputs.get("extra_indptr"),
        "attn_sink": inputs["sink"],
        "scale": inputs["scale"],
        "head_dim": 512,
        "nope_head_dim": 448,
        "rope_head_dim": 64,
        "output": inputs["out"],
        "inv_rope_positions": inputs.get("positions"),
        "inv_rope_cos_sin_cache": inputs.get("cos_sin_cache"),
    }


def bytes_moved(case: Case) -> int:
    """Bytes that must be read and written: a record and its slot for each row of each token, q, the output."""
    params = _with_defaults(case.params)
    per_head = 2 * params["tokens"] * params["heads"] * 512 * 2
    return int(per_head + (584 + 4) * _total_rows(params))


def flops(case: Case) -> int:
    """Two products of 512 per head and listed row."""
    params = _with_defaults(case.params)
    return sparse_inputs.flops(params["heads"], _total_rows(params))


def _with_defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "topk": None, "kind": "usual", "order": "random", "sink": "usual", "holes": 0.0, "nan": 0.0, "apart": False,
        "swa_block": 32, "block": 64, "rotated": False, "max_position": 300, "cos_sin_stride": 64,
        **dict.fromkeys(("q_stride", "out_stride"), 512),
        **dict.fromkeys(("q_shift", "out_shift", "spare_heads", "swa_gap", "gap", "cache_shift", "index_base"), 0),
    }  # fmt: skip
    return defaults | dict(params)


def _total_rows(params: Mapping[str, Any]) -> int:
    return sum(sparse_inputs.total_rows(params[rows] or 0, params["tokens"]) for rows in ("swa", "topk"))


def _make_q(params: Mapping[str, Any], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[T, H, 512]`, and the direction that orders a token's rows by their scores."""
    shape = (params["tokens"], params["heads"], 512)
    size = SIZES.get(params["kind"], (1.0, 1.0))[0]
    q = torch.randn(shape, generator=generator)
    direction = torch.randn(shape[0], 1, 512, generator=generator)
    if params["order"] != "random":
        q = 0.2 * q + direction
    if params["kind"] == "codes":
        # scores come from the tail alone: no exponent is safe under every scale
        q[..., :448] = 0.0
    if params["kind"] == "small-scales":
        # as large as the values are small, so that a code decides how much its row counts
        q[..., :448] *= torch.exp2(120.0 - _small_scales(shape[0])).repeat_interleave(64, 1)[:, None]
        q[..., 448:] = 0.0
    return (q * size).bfloat16(), direction[:, 0]


def _small_scales(tokens: int) -> torch.Tensor:
    """Scale codes `[T, 7]`, 0 to 104 in turn."""
    return torch.arange(7 * tokens).view(tokens, 7) % 105


def _make_list(
    params: Mapping[str, Any],
    name: str,
    rows: Rows,
    direction: torch.Tensor,
    generator: torch.Generator,
) -> tuple[Cache, torch.Tensor, torch.Tensor]:
    """A cache on the CPU's side, the slots of all tokens and where each token's end."""
    counts = sparse_inputs.row_counts(rows, params["tokens"], generator)
    longest = max(counts, default=0)
    prefix = "swa_" if name == "swa" else ""
    block = params[f"{prefix}block"]
    # each token has rows of its own, in order
    apart = params["apart"]
    wanted = params.get(f"{prefix}rows", sum(counts) + 11 if apart else 2 * longest + 11)
    blocks = -(-wanted // block)
    total = blocks * block
    # some slots of a page stay unused: they are what a missing mask would read
    used = torch.randperm(min(total, 1 << 17), generator=generator)[: max(1, min(wanted, 1 << 17) - 8)]
    used = (used * (total // len(used) if total > 1 << 17 else 1)) % total
    cache = Cache(blocks, block, used, _make_values(params, name, len(used), generator))
    cache.poison_with(params["nan"], generator)
    lists, first = [torch.full((params["index_base"],), int(used[0]))], 0
    for token, count in enumerate(counts):
        chosen = torch.randint(len(used), (count,), generator=generator)
        if apart:
            chosen = torch.arange(first, first + count)
            first += count
        if params["order"] != "random":
            scores = cache.values[chosen] @ direction[token]
            chosen = chosen[scores.argsort(descending=params["order"] == "descending")]
        holes = params["holes"]
        share = float(holes == name) if isinstance(holes, str) else holes
        hole = torch.rand(count, generator=generator) < share
        lists.append(sparse_inputs.with_holes(used[chosen], hole, total, generator))
    ends = params["index_base"] + torch.tensor([0, *counts]).cumsum(0)
    # what follows the last list is no token's
    lists.append(torch.full((params["spare_slots"],), int(used[0])))
    return cache, torch.cat(lists).to(torch.int32), ends.to(torch.int32)


def _make_values(
    params: Mapping[str, Any], name: str, count: int, generator: torch.Generator
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Values `[n, 512]` to quantise, or codes, scales and tails as they are."""
    values = torch.randn(count, 512, generator=generator)
    if params["kind"] not in ("codes", "small-scales"):
        return values * SIZES.get(params["kind"], (1.0, 1.0))[1]
    codes = torch.randint(256, (count, 448), generator=generator)
    if params["kind"] == "small-scales":
        codes[codes & 0x7F == 0x7F] = 0
        # rows of the first list carry the scale in question, those of the second are like any other
        scales = _small_scales(count) if name == "swa" else torch.full((count, 7), 1)
        return codes, scales, values[:, 448:].bfloat16()
    scales = torch.randint(256, (count, 7), generator=generator)
    # each scale once among the first rows, those that a plain look at the output can tell first
    first = torch.arange(min(count * 7, 256))
    scales.view(-1)[first] = 255 - first
    # small codes under the largest scales: infinities are not defined, sums of 100 rows must not overflow
    huge = (scales > 219).repeat_interleave(64, 1)
    return torch.where(huge, codes & 0x81, codes), scales, values[:, 448:].bfloat16()


def _on_device(
    name: str,
    made: tuple[Cache, torch.Tensor, torch.Tensor],
    params: Mapping[str, Any],
    gap: int,
    device: str | torch.device,
) -> dict[str, torch.Tensor]:
    cache, indices, indptr = made
    return {
        f"{name}_cache": write_cache(cache, gap, params["cache_shift"], device),
        f"{name}_indices": indices.to(device),
        f"{name}_indptr": indptr.to(device),
    }


def _make_rotation(
    params: Mapping[str, Any], generator: torch.Generator, device: str | torch.device
) -> dict[str, torch.Tensor]:
    last, stride = params["max_position"], params["cos_sin_stride"]
    positions = torch.randint(last, (params["tokens"],), generator=generator)
    positions[:1] = last - 1
    angles = torch.arange(last)[:, None] * 10_000.0 ** -(torch.arange(32) / 32)
    table = torch.full((last, stride), POISON)
    table[:, :64] = torch.cat([angles.cos(), angles.sin()], 1)
    return {"positions": positions.to(device), "cos_sin_cache": table.to(device)[:, :64]}
