#!/usr/bin/env python3
"""Rewrites the benchmark tables between the markers of README.md and benchmarks/README.md from the summary.

`--check` changes nothing and exits 1 if a table is not current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from microbench import ROOT, SUMMARY

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
FILES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
_BASELINES = ("stock", "stock-0.30-grid", "torch")


def table(result: dict[str, Any]) -> str:
    """The summary as Markdown: one line per case of the overlay, with its speed-ups."""
    from deepinfer_cli.validate.results import speedup

    rows = result["rows"]
    baselines = [name for name in _BASELINES if any(row["provider"] == name for row in rows)]
    headers = [
        "Op",
        "Case",
        "Code",
        "Latency (us)",
        *[f"vs `{name}`" for name in baselines],
        "GB/s",
        "Of copy bandwidth",
    ]
    lines = [_line(headers), _line(["---", "---", "---", *["---:"] * (len(headers) - 3)])]
    for row in rows:
        if row["provider"] != "overlay" or row["timing"] != "graph":
            continue
        if not row["latency_us"]:
            cells = [row["op"], _case(row), row["codegen"], row["status"], *["-"] * (len(headers) - 4)]
        else:
            ratios = [_ratio(rows, row, name, speedup) for name in baselines]
            median = row["latency_us"]["p50"]
            rate, share = row["bytes"] / median / 1e3, 100 * row["ceiling_fraction"]
            cells = [
                row["op"],
                _case(row),
                row["codegen"],
                f"{median:.1f}",
                *ratios,
                f"{rate:,.0f}",
                f"{share:.0f} %",
            ]
        lines.append(_line(cells))
    env = result["environment"]
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton", "vllm") if env.get(name))
    note = f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}, {versions}, {env['date'][:10]}."
    return "\n".join([*lines, "", note])


def _ratio(rows: list[dict[str, Any]], row: dict[str, Any], name: str, speedup: Any) -> str:
    """Against a baseline with the same timing; `torch` is timed by events, and so is the overlay against it."""
    for mine in (row, *[other for other in rows if _same(other, row) and other["timing"] != row["timing"]]):
        value = speedup(rows, mine, name)
        if value is not None:
            return f"{value:.2f}x"
    return "-"


def _same(other: dict[str, Any], row: dict[str, Any]) -> bool:
    return all(other[key] == row[key] for key in ("op", "case", "provider"))


def _case(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in row["case"].items()
    )


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rewritten(text: str, content: str) -> str:
    """`text` with `content` between the markers; unchanged when it has none."""
    if BEGIN not in text or END not in text:
        return text
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{content}\n{END}{rest.split(END, 1)[1]}"


def main(argv: list[str] | None = None) -> int:
    """Rewrites, or checks."""
    from deepinfer_cli.validate import results

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the tables are current")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("files", type=Path, nargs="*", default=FILES)
    options = parser.parse_args(argv)
    if not options.summary.exists():
        print(f"{options.summary} does not exist: nothing has been measured", file=sys.stderr)
        return 0
    content = table(results.read(options.summary))
    stale = []
    for path in options.files:
        old = path.read_text(encoding="utf-8")
        new = rewritten(old, content)
        if new != old:
            stale.append(path)
            if not options.check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(
            f"{path} {'is not current: run benchmarks/generate_tables.py' if options.check else 'rewritten'}"
        )
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
