"""What the tables and the charts share: how ops are grouped, which rows are the overlay's, what was published by others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from microbench import ROOT

PUBLISHED = ROOT / "benchmarks" / "published.json"
GROUPS = {
    "sparse-mla": ("Sparse MLA", ("sparse_decode", "sparse_prefill", "gather")),
    "mhc": ("mHC", ("mhc_fused_post_pre_delayed", "mhc_pre_delayed", "mhc_post", "mhc_post_with_sqrsum")),
    "indices": ("Indices", ("combine", "ragged")),
    "enable": (
        "What stock lacks on SM8x",
        ("indexer_prefill", "indexer_decode", "indexer_q", "indexer_k", "kv_insert", "engram"),
    ),
}
# what vLLM 0.30 ran, where it is not what later releases run
OLD = {"gather": "stock-0.30-grid", "combine": "torch"}
# params that say how many: a chart's x axis, not a part of a series' name
TOKENS = "tokens"

Row = dict[str, Any]


def line(cells: list[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def rewritten(text: str, markers: tuple[str, str], content: str) -> str:
    """`text` with `content` between the markers; unchanged when it has none."""
    begin, end = markers
    if begin not in text or end not in text:
        return text
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"


def overlay_rows(rows: Iterable[Row], op: str) -> list[Row]:
    """The overlay's rows of an op, one for each case and kind of code."""
    return [row for row in rows if (row["op"], row["provider"], row["timing"]) == (op, "overlay", "graph")]


def ratio(rows: list[Row], row: Row, provider: str) -> float | None:
    """Against a baseline with the same timing; `torch` is timed by events, and so is the overlay against it."""
    from deepinfer_cli.validate.results import speedup

    same = [other for other in rows if _same(other, row) and other["timing"] != row["timing"]]
    for mine in (row, *same):
        value = speedup(rows, mine, provider)
        if value is not None:
            return value
    return None


def _same(other: Row, row: Row) -> bool:
    keys = ("op", "case", "provider", "codegen")
    return all(other[key] == row[key] for key in keys) and other.get("arch") == row.get("arch")


def constant_params(rows: Iterable[Row]) -> dict[str, Any]:
    """The params that have one value in all these rows, in the order of the first."""
    rows = list(rows)
    first = rows[0]["case"] if rows else {}
    return {key: value for key, value in first.items() if all(row["case"].get(key) == value for row in rows)}


def derived_params(rows: Iterable[Row]) -> set[str]:
    """The params that follow from the number of tokens, such as the size of a cache: no case is told by them."""
    rows = list(rows)
    sizes = {row["case"].get(TOKENS) for row in rows}
    found = set()
    for name in {name for row in rows for name in row["case"]} - {TOKENS, "heads", "width"}:
        values = {(row["case"].get(TOKENS), row["case"].get(name)) for row in rows}
        if len(values) == len(sizes) > 1:
            found.add(name)
    return found


def case_text(case: dict[str, Any], without: Iterable[str] = ()) -> str:
    """A case in words: `tokens 49,152, block_size 64`."""
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in case.items()
        if name not in without
    )


def code_text(row: Row) -> str:
    """The code of a row: `sm80`, or `sm80, 48 KB` where shared memory was limited."""
    limit = row["case"].get("max_smem")
    return row["codegen"] if limit is None else f"{row['codegen']}, {limit // 1024} KB"


def disclaimer() -> str:
    """What the column of published figures is."""
    content = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return f"Published, A100: {content['source']}"


def published(op: str, case: dict[str, Any]) -> Row | None:
    """What the original's authors published for this case, on A100-class cards."""
    for row in json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]:
        # one figure for a size: not once more for each limit or number of heads
        if row["op"] == op and row["case"]["tokens"] == case.get("tokens") and "max_smem" not in case:
            return dict(row)
    return None


def machine(environment: dict[str, Any]) -> str:
    """The machine of a summary in one sentence."""
    names = ("torch", "triton", "tilelang", "vllm")
    versions = ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name))
    text = f"{environment['gpu']}, driver {environment['driver']}, CUDA {environment['cuda']}, {versions}"
    roofs = [f"copy {environment['copy_gb_per_s']:,.0f} GB/s"] if environment.get("copy_gb_per_s") else []
    rates = environment.get("mma_tflops") or {}
    roofs += [f"`mma.sync` {rate:,.0f} TFLOP/s ({arch})" for arch, rate in rates.items()]
    ceilings = f" Ceilings measured there: {', '.join(roofs)}." if roofs else ""
    return f"{text}, {environment['date'][:10]}.{ceilings}"
