#!/usr/bin/env python3
"""Rewrites the benchmark tables between the markers of README.md (a digest) and benchmarks/README.md (everything).

`--check` changes nothing and exits 1 if a table is not current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import report
from microbench import ROOT, SUMMARY
from report import Row

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
FILES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
# what the digest shows of each op: values of `tokens`, and other params where they differ; other code than sm80's,
# and what fits 48 KB, of those ops alone where it matters most
DIGEST: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "sparse_decode": ((1, 6, 24, 96), {"heads": 64}),
    "sparse_prefill": ((2048,), {"heads": 64}),
    "gather": ((16384, 49152), {}),
    "mhc_fused_post_pre_delayed": ((6, 12), {}),
    "mhc_pre_delayed": ((2048,), {}),
    "mhc_post": ((2048,), {}),
    "combine": ((1536,), {}),
    "ragged": ((96, 2048), {}),
}
_DIGEST_OTHER_CODE = ("sparse_prefill",)
_DIGEST_PARAMS = ("tokens", "heads", "width")
_RIGHT = "---:"
# an op that never gets there is not about multiplying
_LEAST_TFLOPS = 5.0


def digest(result: dict[str, Any]) -> str:
    """A few rows of each op: latency, what it is over stock, its share of what the card can do, and what others say."""
    rows = result["rows"]
    headers = [
        "Op",
        "Case",
        "Code",
        "Latency (us)",
        "vs `stock`",
        "vs 0.30's",
        "Of the ceiling",
        "Published, A100",
    ]
    lines = [report.line(headers), report.line(["---"] * 3 + [_RIGHT] * 5)]
    for _title, ops in report.GROUPS.values():
        for op in ops:
            mine = report.overlay_rows(rows, op)
            for row in filter(_in_digest, mine):
                shown = {key: value for key, value in row["case"].items() if key in _DIGEST_PARAMS}
                cells = [op, report.case_text(shown), report.code_text(row), _latency(row)]
                cells += [_ratio(rows, row, "stock"), _ratio(rows, row, report.OLD.get(op, ""))]
                lines.append(report.line([*cells, _ceiling(row), _published(row)]))
    return "\n".join([*lines, "", report.machine(result["environment"]), "", report.disclaimer()])


def _in_digest(row: Row) -> bool:
    sizes, wanted = DIGEST.get(row["op"], ((), {}))
    case = row["case"]
    if case.get("layout", "ragged") != "ragged" or case.get("tokens") not in sizes:
        return False
    usual = row["codegen"] in ("sm80", "native") and "max_smem" not in case
    return wanted.items() <= case.items() and (usual or row["op"] in _DIGEST_OTHER_CODE)


def full(result: dict[str, Any]) -> str:
    """A table for each op, with every baseline."""
    parts = []
    for title, ops in report.GROUPS.values():
        tables = [_table(result["rows"], op) for op in ops if report.overlay_rows(result["rows"], op)]
        if tables:
            parts += [f"### {title}", *tables]
    return "\n\n".join([*parts, report.machine(result["environment"]), report.disclaimer()])


def _table(rows: list[Row], op: str) -> str:
    mine = report.overlay_rows(rows, op)
    constant = {key: value for key, value in report.constant_params(mine).items() if key != report.TOKENS}
    derived = report.derived_params(mine) - constant.keys()
    claims = any(report.published(op, row["case"]) for row in mine)
    providers = {row["provider"] for row in rows if row["op"] == op and row["provider"] != "overlay"}
    baselines = [name for name in _order() if name in providers]
    measured = [row for row in mine if row["latency_us"]]
    multiplies = any(row["flops"] / row["latency_us"]["p50"] / 1e6 > _LEAST_TFLOPS for row in measured)
    headers = ["Case", "Code", "Latency (us)", *[f"vs `{name}`" for name in baselines], "GB/s"]
    headers += ["TFLOP/s"] * multiplies + ["Of the ceiling"] + ["Published, A100"] * claims
    lines = [report.line(headers), report.line(["---", "---", *[_RIGHT] * (len(headers) - 2)])]
    for row in mine:
        cells = [
            report.case_text(row["case"], {*constant, *derived, "max_smem"}),
            report.code_text(row),
            _latency(row),
        ]
        cells += [_ratio(rows, row, name) for name in baselines]
        cells += [_rate(row, "bytes", 1e3)] + [_rate(row, "flops", 1e6)] * multiplies
        lines.append(report.line([*cells, _ceiling(row), *[_published(row)] * claims]))
    where = f" ({report.case_text(constant)})" if constant else ""
    return "\n".join([f"`{op}`{where}", "", *lines])


def _order() -> tuple[str, ...]:
    from deepinfer_cli.validate.baselines import NAMES

    return NAMES


def _latency(row: Row) -> str:
    return f"{row['latency_us']['p50']:,.1f}" if row["latency_us"] else str(row["status"])


def _ratio(rows: list[Row], row: Row, name: str) -> str:
    value = report.ratio(rows, row, name)
    if value is not None:
        return f"{value:.2f}x"
    other = next((one for one in rows if one["provider"] == name and _pairs(one, row)), None)
    # a baseline that cannot run there is a finding
    return (
        "-"
        if other is None or other["status"] == "PASSED"
        else str(other["status"]).lower().replace("_", " ")
    )


def _pairs(one: Row, row: Row) -> bool:
    return (one["op"], one["case"], one.get("arch")) == (row["op"], row["case"], row.get("arch"))


def _rate(row: Row, what: str, unit: float) -> str:
    return f"{row[what] / row['latency_us']['p50'] / unit:,.0f}" if row["latency_us"] else "-"


def _ceiling(row: Row) -> str:
    if row["ceiling_fraction"] is None:
        return "-"
    roof = {"copy": "copy", "mma": "`mma.sync`"}[row.get("ceiling", "copy")]
    return f"{100 * row['ceiling_fraction']:.0f} % of {roof}"


def _published(row: Row) -> str:
    found = report.published(row["op"], row["case"])
    return "-" if found is None else f"{found['speedup']:.2f}x"


def main(argv: list[str] | None = None) -> int:
    """Rewrites, or checks."""
    from deepinfer_cli.validate import results

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the tables are current")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("--digest", type=Path, default=FILES[0], help="file that gets the digest")
    parser.add_argument("--full", type=Path, default=FILES[1], help="file that gets every row")
    options = parser.parse_args(argv)
    if not options.summary.exists():
        print(f"{options.summary} does not exist: nothing has been measured", file=sys.stderr)
        return 0
    result = results.read(options.summary)
    stale = False
    for path, make in ((options.digest, digest), (options.full, full)):
        old = path.read_text(encoding="utf-8")
        new = report.rewritten(old, (BEGIN, END), make(result))
        if new == old:
            continue
        stale = True
        if not options.check:
            path.write_text(new, encoding="utf-8")
        print(
            f"{path} {'is not current: run benchmarks/generate_tables.py' if options.check else 'rewritten'}"
        )
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
