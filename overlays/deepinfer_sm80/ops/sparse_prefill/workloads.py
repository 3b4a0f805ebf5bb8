"""Workloads of `sparse_prefill`: cases, inputs and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import sparse_inputs
from ..sparse_inputs import POISON, SCALE, SIZES, Rows, strided
from ..spec import Case, case_maker
from . import reference, sparse_prefill

OP = "sparse_prefill"
TOLERANCES = sparse_inputs.TOLERANCES
_case = case_maker(OP)

_SMOKE = (
    _case("usual", tokens=2, heads=16, rows=70),
    _case("dense", tokens=3, heads=16, rows=(20, 70), layout="dense"),
    _case("flat", tokens=1, heads=16, rows=90, kind="flat"),
    _case("peaked", tokens=1, heads=16, rows=90, kind="peaked"),
    _case("best-row-last", tokens=1, heads=16, rows=150, kind="peaked", order="ascending"),
    _case("best-row-first", tokens=1, heads=16, rows=150, kind="peaked", order="descending"),
    _case("one-row", tokens=3, heads=16, rows=1),
    _case("two-rows", tokens=3, heads=16, rows=2, layout="dense"),
    _case("one-row-no-sink", tokens=2, heads=16, rows=1, sink="none"),
    _case("sink-dominated", tokens=2, heads=16, rows=40, sink="large"),
    _case("no-sink", tokens=1, heads=16, rows=70, sink="none"),
    _case("sink-minus-infinity", tokens=3, heads=16, rows=[0, 33, 1], sink="minus-infinity"),
    _case("large-scores", tokens=1, heads=16, rows=70, kind="large"),
    _case("large-values", tokens=1, heads=16, rows=70, kind="tall"),
    _case("no-rows", tokens=4, heads=16, rows=[0, 17, 0, 0]),
    _case("no-rows-no-sink", tokens=3, heads=16, rows=[0, 9, 0], sink="none", layout="dense"),
    _case("all-invalid", tokens=2, heads=16, rows=40, holes=1.0),
    _case("all-invalid-no-sink", tokens=2, heads=16, rows=40, holes=1.0, sink="none", layout="dense"),
    _case("holes", tokens=2, heads=16, rows=100, holes=0.4),
    _case("holes-dense", tokens=2, heads=16, rows=100, holes=0.4, layout="dense"),
    _case("first-tile-invalid", tokens=1, heads=16, rows=150, holes="first-100", sink="none"),
    _case("last-tile-invalid", tokens=1, heads=16, rows=150, holes="last-100"),
    _case("tile-boundaries", tokens=7, heads=8, rows=[15, 16, 17, 31, 32, 33, 64]),
    _case("8-heads", tokens=2, heads=8, rows=30),
    _case("12-heads", tokens=1, heads=12, rows=30),
    _case("1-head", tokens=1, heads=1, rows=30),
    _case("24-heads", tokens=1, heads=24, rows=40),
    _case("128-heads", tokens=1, heads=128, rows=20, layout="dense"),
    _case("no-tokens", tokens=0, heads=16, rows=5),
    _case("one-kv-row", tokens=2, heads=16, rows=3, kv_rows=1),
    _case("no-kv-rows", tokens=2, heads=16, rows=0, kv_rows=0, layout="dense"),
    _case("repeated-slots", tokens=1, heads=16, rows=60, kv_rows=7),
    _case("dense-width-odd", tokens=3, heads=16, rows=(1, 37), layout="dense", width=37),
    _case("dense-row-gap", tokens=3, heads=16, rows=(1, 37), layout="dense", width=40, index_gap=5),
    _case("dense-lengths-past-width", tokens=3, heads=16, rows=37, layout="dense", width=37, over_length=9),
    _case("ragged-from-the-middle", tokens=3, heads=16, rows=(1, 37), index_base=13),
    _case("padded-rows", tokens=2, heads=16, rows=40, q_stride=520, kv_stride=576, out_stride=528),
    _case("tokens-apart", tokens=2, heads=16, rows=40, spare_heads=3),
    # a stride that the TileLang kernel does not take: on a GPU too it is Triton's for aligned rows
    _case("token-stride-2^31", tokens=1, heads=24, rows=150, holes=0.1, q_stride_token=1 << 31),
    _case("odd-strides", tokens=2, heads=16, rows=40, q_stride=513, kv_stride=515, out_stride=517),
    _case("odd-kv-address", tokens=2, heads=16, rows=40, kv_shift=1),
    _case("odd-q-and-out-addresses", tokens=2, heads=16, rows=40, q_shift=3, out_shift=1),
    _case("odd-indices-address", tokens=2, heads=16, rows=40, index_base=1, layout="dense", index_gap=3),
    _case("long-sink", tokens=1, heads=16, rows=40, sink="long"),
    _case("unit-normal-512-rows", tokens=1, heads=64, rows=512, sink="none", max_abs=4.8e-3),
)  # fmt: skip
_FULL = (
    _case("unit-normal-64-heads", "full", tokens=32, heads=64, rows=512, sink="none", max_abs=4.8e-3, gpu_only=True),
    _case("unit-normal-with-sink", "full", tokens=32, heads=64, rows=512, max_abs=4.8e-3, gpu_only=True),
    *(
        _case(f"{heads}-heads-{tokens}-tokens", "full", tokens=tokens, heads=heads, rows=640, gpu_only=True)
        for tokens, heads in ((1, 64), (17, 8), (129, 16), (200, 24), (300, 32), (65, 128), (40, 40), (33, 100))
    ),
    *(
        _case(f"{kind}-{order}-640-rows", "full", tokens=24, heads=64, rows=640, kind=kind, order=order, gpu_only=True)
        for kind in ("flat", "peaked", "large", "tall")
        for order in ("random", "ascending", "descending")
    ),
    _case("sink-dominated-640-rows", "full", tokens=24, heads=64, rows=640, sink="large", gpu_only=True),
    _case("dense-ramp", "full", tokens=700, heads=32, rows=(0, 640), layout="dense", width=640, gpu_only=True),
    _case("dense-holes", "full", tokens=300, heads=64, rows=(0, 640), layout="dense", width=640, holes=0.3, gpu_only=True),
    _case("ragged-ramp", "full", tokens=700, heads=64, rows=(0, 700), holes=0.05, gpu_only=True),
    _case("long-lists", "full", tokens=9, heads=64, rows=(2000, 5000), kv_rows=6000, gpu_only=True),
    _case("64-heads-2048-tokens", "full", tokens=2048, heads=64, rows=640, kv_rows=8192, gpu_only=True, memory_bytes=1 << 30),
    _case("32-heads-2048-tokens-dense", "full", tokens=2048, heads=32, rows=640, kv_rows=8192, layout="dense", gpu_only=True),
    _case("kv-over-2^31-elements", "full", tokens=20, heads=64, rows=300, kv_rows=1100, kv_stride=1 << 21, gpu_only=True,
          memory_bytes=5 << 30),
    _case("q-over-2^31-elements", "full", tokens=3, heads=16, rows=90, q_spare_heads=(1 << 21) + 5, gpu_only=True,
          memory_bytes=7 << 30),
    _case("out-over-2^31-elements", "full", tokens=3, heads=16, rows=90, spare_heads=(1 << 21) + 5, gpu_only=True,
          memory_bytes=7 << 30),
    _case("indices-over-2^31-elements", "full", tokens=3, heads=16, rows=90, layout="dense", index_gap=(1 << 30) + 3,
          gpu_only=True, memory_bytes=13 << 30),
    _case("odd-strides-640-rows", "full", tokens=40, heads=64, rows=640, q_stride=513, kv_stride=515, out_stride=517,
          gpu_only=True),
)  # fmt: skip


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """512 Top-K rows of 8,192 and the 128 of the token's window, ragged; once dense."""
    shared: dict[str, Any] = {"rows": 640, "kind": "usual", "gpu_only": True}
    sizes = [(tokens, heads) for heads in (64, 32) for tokens in (512, 2048)]
    return (
        *(
            _case(
                f"{tokens}-tokens-{heads}-heads", "bench", tokens=tokens, heads=heads,
                kv_rows=8192 + 127 + tokens, order="window", **shared,
            )
            for tokens, heads in sizes
        ),
        _case(
            "2048-tokens-64-heads-dense", "bench", tokens=2048, heads=64, kv_rows=8192 + 127 + 2048, order="window",
            layout="dense", **shared,
        ),
    )  # fmt: skip


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `sparse_prefill`, made from the case's seed; `out` and unnamed KV rows are NaN."""
    params = _with_defaults(case.params)
    generator = torch.Generator().manual_seed(case.seed)
    tokens, heads = params["tokens"], params["heads"]
    q_size, kv_size = SIZES[params["kind"]]
    # one direction per token for all its heads, where rows are ordered by their scores
    shared = (
        0.0 if params["order"] in ("random", "window") else torch.randn(tokens, 1, 512, generator=generator)
    )
    q = torch.randn(tokens, heads, 512, generator=generator) * (
        0.2 if params["order"].endswith("cending") else 1
    )
    q = ((q + shared) * q_size).bfloat16()
    kv = (torch.randn(params["kv_rows"], 512, generator=generator) * kv_size).bfloat16()
    counts = sparse_inputs.row_counts(params["rows"], tokens, generator)
    lists, spare = _make_lists(params, q, kv, counts, generator)
    kv[~_named(lists, params["kv_rows"])] = POISON
    make = _make_dense if params["layout"] == "dense" else _make_ragged
    room = heads + max(params["spare_heads"], params["q_spare_heads"])
    given = strided(q, room, params["q_stride"], params["q_shift"], device)
    if params["q_stride_token"]:
        # of one token: no memory lies there
        given = given.as_strided(given.shape, (params["q_stride_token"], *given.stride()[1:]))
    return {
        "q": given,
        "kv": _make_kv(params, kv, device),
        "out": strided(
            torch.full_like(q, POISON), heads + params["spare_heads"], params["out_stride"], params["out_shift"], device
        ),
        "scale": SCALE,
        "sink": sparse_inputs.make_sink(params["sink"], heads, generator, device),
        **make(params, lists, spare, device),
    }  # fmt: skip


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's whole output, not rounded, and its error measure as `out:bound`."""
    return sparse_inputs.expected(reference.attend, inputs)


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, and returns the whole output."""
    (function or sparse_prefill)(**inputs)
    return {"out": sparse_inputs.whole(inputs["out"])}


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's `rocm_sparse_attn_prefill` (every `style`)."""
    dense = inputs.get("indptr") is None
    return {
        "q": inputs["q"],
        "kv": inputs["kv"][:, None],
        "indices": inputs["indices"] if dense else None,
        "topk_length": inputs.get("lengths"),
        "scale": inputs["scale"],
        "head_dim": 512,
        "nope_head_dim": 448,
        "rope_head_dim": 64,
        "attn_sink": inputs["sink"],
        "output": inputs["out"],
        "ragged_indices": None if dense else inputs["indices"],
        "ragged_indptr": inputs.get("indptr"),
    }


def bytes_moved(case: Case) -> int:
    """Bytes that must be read and written once: q, the KV rows, the slots, the output."""
    params = _with_defaults(case.params)
    per_head = 2 * params["tokens"] * params["heads"] * 512 * 2
    return int(
        per_head + params["kv_rows"] * 1024 + 4 * sparse_inputs.total_rows(params["rows"], params["tokens"])
    )


def flops(case: Case) -> int:
    """Two products of 512 per head and listed row."""
    rows = sparse_inputs.total_rows(case.params["rows"], case.params["tokens"])
    return sparse_inputs.flops(case.params["heads"], rows)


def _with_defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "layout": "ragged", "kind": "usual", "order": "random", "sink": "usual", "holes": 0.0,
        **dict.fromkeys(("q_stride", "kv_stride", "out_stride"), 512),
        **dict.fromkeys(("q_shift", "kv_shift", "out_shift", "spare_heads", "q_spare_heads", "q_stride_token"), 0),
        **dict.fromkeys(("index_gap", "index_base", "over_length"), 0),
    }  # fmt: skip
    merged = defaults | dict(params)
    longest = _longest(merged["rows"])
    merged.setdefault("kv_rows", 2 * longest + 11)
    merged.setdefault("width", longest + 3)
    return merged


def _longest(rows: Rows) -> int:
    return rows if isinstance(rows, int) else max(rows)


def _make_lists(
    params: Mapping[str, Any],
    q: torch.Tensor,
    kv: torch.Tensor,
    counts: list[int],
    generator: torch.Generator,
) -> tuple[list[torch.Tensor], int]:
    """Slots of each token, and one slot inside the range that no token names."""
    total = params["kv_rows"]
    shuffled = torch.randperm(total, generator=generator)
    # at least one row of several stays unnamed: it is what a missing mask would read
    usable, spare = shuffled[: max(1, total - 1)], int(shuffled[-1]) if total > 1 else 0
    lists = []
    for token, count in enumerate(counts):
        if params["order"] == "window":
            slots = _windowed(count, token, total - params["tokens"], usable, generator)
        else:
            slots = usable[torch.randint(len(usable), (count,), generator=generator)] if total else usable
        if params["order"] in ("ascending", "descending"):
            scores = kv[slots].float() @ q[token].float().mean(0)
            slots = slots[scores.argsort(descending=params["order"] == "descending")]
        hole = _holes(params["holes"], count, generator)
        lists.append(sparse_inputs.with_holes(slots, hole, total, generator))
    return lists, spare


def _windowed(
    count: int, token: int, end: int, usable: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Distinct random rows in front of the windows, then the 128 rows that end at the token's own."""
    first = end - 127
    chosen = torch.randperm(first, generator=generator)[: count - 128]
    return torch.cat([chosen, torch.arange(first + token, first + token + 128)])


def _holes(holes: float | str, count: int, generator: torch.Generator) -> torch.Tensor:
    if isinstance(holes, str):
        where, _, number = holes.partition("-")
        position = torch.arange(count)
        return position < int(number) if where == "first" else position >= count - int(number)
    return torch.rand(count, generator=generator) < holes


def _named(lists: list[torch.Tensor], kv_rows: int) -> torch.Tensor:
    named = torch.zeros(kv_rows, dtype=torch.bool)
    for slots in lists:
        named[slots[(slots >= 0) & (slots < kv_rows)]] = True
    return named


def _make_dense(
    params: Mapping[str, Any], lists: list[torch.Tensor], spare: int, device: str | torch.device
) -> dict[str, Any]:
    tokens, width, base = len(lists), params["width"], params["index_base"]
    stride = width + params["index_gap"]
    memory = torch.full((base + tokens * stride,), spare, dtype=torch.int32, device=device)
    indices = torch.as_strided(memory, (tokens, width), (stride, 1), base)
    for token, slots in enumerate(lists):
        indices[token, : len(slots)] = slots.to(torch.int32).to(device)
    lengths = torch.tensor([len(slots) + params["over_length"] for slots in lists], dtype=torch.int32)
    return {"indices": indices, "lengths": lengths.to(device)}


def _make_ragged(
    params: Mapping[str, Any], lists: list[torch.Tensor], spare: int, device: str | torch.device
) -> dict[str, Any]:
    base = params["index_base"]
    # as long as the longest lists would make it: what follows the last list is no token's
    capacity = base + len(lists) * _longest(params["rows"]) + 5
    indices = torch.full((capacity,), spare, dtype=torch.int32)
    ends = base + torch.tensor([0, *(len(slots) for slots in lists)]).cumsum(0)
    if lists:
        indices[base : int(ends[-1])] = torch.cat(lists).to(torch.int32)
    return {"indices": indices.to(device), "indptr": ends.to(torch.int32).to(device)}


def _make_kv(params: Mapping[str, Any], kv: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """`kv` with a NaN row before and after it, so that slots -1 and R name something poisonous."""
    stride, shift, rows = params["kv_stride"], params["kv_shift"], kv.shape[0]
    memory = torch.full((shift + (rows + 2) * stride,), POISON, dtype=torch.bfloat16, device=device)
    view = torch.as_strided(memory, (rows, 512), (stride, 1), shift + stride)
    view.copy_(kv)
    return view
