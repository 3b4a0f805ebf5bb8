#!/usr/bin/env python3
"""Rewrites the serving table between its markers in README.md and benchmarks/README.md, and draws its chart.

Both come from results/serving/serving_summary.json, which `deepinfer bench --serving --output FILE` writes. `--check`
changes nothing and exits 1 if a table is not current; `--chart` also draws results/serving/serving.png and .svg
(needs matplotlib: `pip install 'deepinfer[bench]'`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from microbench import ROOT
from report import Row

SUMMARY = ROOT / "benchmarks" / "results" / "serving" / "serving_summary.json"
BEGIN, END = "<!-- serving:begin -->", "<!-- serving:end -->"
FILES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
OVERLAY, OTHER = "overlay", "enable-only"
# what the table shows of each workload
_METRICS = {
    "prefill": ("prefill_tokens_per_s", "ttft_s"),
    "decode": ("decode_tokens_per_s", "acceptance_length"),
}
_COLOURS = {OVERLAY: "#0072b2", OTHER: "#e69f00"}
_PANELS = {
    "prefill_tokens_per_s": "Cold prefill, tokens/s", "ttft_s": "Time to first token of a cold prompt, s",
    "decode_tokens_per_s": "Decode, tokens/s of all streams",
}  # fmt: skip


def published() -> dict[str, Any]:
    """What others published for the whole model."""
    return dict(json.loads(report.PUBLISHED.read_text(encoding="utf-8"))["serving"])


def claim(row: Row, metric: str) -> str:
    """The published figures of a row's workload, before and after; `-` where there are none."""
    for one in published()["rows"]:
        same = all(row["case"].get(name) == value for name, value in one["case"].items())
        if one["workload"] == row["workload"] and one["metric"] == metric and same:
            better = one["after"] / one["before"] if metric != "ttft_s" else one["before"] / one["after"]
            return f"{one['before']:,.1f} → {one['after']:,.1f} ({better:.2f}x)"
    return "-"


def content(result: dict[str, Any]) -> str:
    """The table and what to know of it."""
    others = published()
    rows = result["rows"]
    head = [
        "Workload",
        "Metric",
        "All ops",
        "Accelerate ops off",
        "Ratio",
        "Overlay in both",
        "Published by others",
    ]
    lines = [report.line(head), report.line(["---"] * 2 + ["---:"] * 3 + ["---", "---:"])]
    lines += [report.line(cells) for row in rows if row["provider"] == OVERLAY for cells in _cells(rows, row)]
    source = f"Published: {others['card']}: {others['source']}"
    if unseen := "; ".join(_unseen(rows, others)):
        source += f" Also published, of no row here: {unseen}."
    return "\n".join([*lines, "", _noise(rows), "", _how(result), "", source])


def _unseen(rows: list[Row], others: dict[str, Any]) -> Iterator[str]:
    """Published figures that stand beside no row."""
    shown = {claim(row, metric) for row in rows for metric in _METRICS.get(row["workload"], ())}
    for one in others["rows"]:
        text = claim({"workload": one["workload"], "case": one["case"]}, one["metric"])
        if text not in shown:
            case = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in one["case"].items())
            yield f"{one['workload']}, {case}, `{one['metric']}`: {text}"


def _cells(rows: list[Row], row: Row) -> Iterator[list[str]]:
    from deepinfer_cli.commands import serving_table
    from deepinfer_cli.validate.serving import rows as serving

    other = serving.partner(rows, row)
    for metric in _METRICS.get(row["workload"], ()):
        if metric not in row["metrics"] or other is None or metric not in other["metrics"]:
            continue
        name, digits = serving_table.SHOWN[metric]
        ratio = serving_table.ratio_text(rows, row, metric) if metric != "acceptance_length" else None
        states = [one["state"] for both in (row, other) for one in both["overlay"].values()]
        yield [
            serving_table.what(row), name, *(_figures(one, metric, digits) for one in (row, other)), ratio or "-",
            " / ".join(states), claim(row, metric),
        ]  # fmt: skip


def _figures(row: Row, metric: str, digits: int) -> str:
    found = row["metrics"][metric]
    return f"{found['p50']:,.{digits}f} ({found['min']:,.{digits}f}-{found['max']:,.{digits}f})"


def _noise(rows: list[Row]) -> str:
    """The scored text in a sentence."""
    apart = {row["provider"]: row for row in rows if row["workload"] == "nll-difference"}
    both = apart.get(f"{OVERLAY} against {OTHER}")
    own = [row["metrics"]["rms"]["max"] for name, row in apart.items() if "itself" in name]
    if both is None or not own:
        return "The text was not scored twice by both."
    scored = {row["provider"]: row["metrics"]["nll"]["p50"] for row in rows if row["workload"] == "nll"}
    return (
        f"NLL of {both['case']['tokens']:,} tokens of text: {scored[OVERLAY]:.5f} with all ops, {scored[OTHER]:.5f} with the "
        f"accelerate ops off (nats a token). Token by token they differ by {both['metrics']['rms']['p50']:.2e} rms; runs of one "
        f"server differ by at most {max(own):.2e}."
    )


def _how(result: dict[str, Any]) -> str:
    serving = result["serving"]
    orders = {
        "together": "both servers at once on one card, runs alternating",
        "in turn": f"one server after the other, {serving['rounds']} round(s)",
        "endpoints": "two running servers, runs alternating",
    }
    vllm = f"vLLM {result['environment']['vllm']}"
    return (
        f"Medians of {serving['runs']} runs of `vllm bench serve` (least-most); {orders[serving['order']]}; model: "
        f"{serving['model']}; {report.machine(result['environment']).replace(vllm.lower(), vllm)} A ratio marked (overlap) is no "
        "difference to speak of: runs of both overlap."
    )


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Bars for both servers, medians with least and most; one panel for each metric."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "deepinfer", "font.size": 9})
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, len(_PANELS), figsize=(4.2 * len(_PANELS), 3.8))
    for axes, (metric, title) in zip(grid, _PANELS.items(), strict=True):
        kind = "decode" if metric.startswith("decode") else "prefill"
        rows = [row for row in result["rows"] if row["workload"] == kind and metric in row["metrics"]]
        names = list(dict.fromkeys(_group(row) for row in rows))
        for place, provider in enumerate((OVERLAY, OTHER)):
            mine = [row for row in rows if row["provider"] == provider]
            at = [names.index(_group(row)) + 0.4 * (place - 0.5) for row in mine]
            figures = [row["metrics"][metric] for row in mine]
            middle = [one["p50"] for one in figures]
            spread = [
                [one["p50"] - one["min"] for one in figures],
                [one["max"] - one["p50"] for one in figures],
            ]
            label = "all ops" if provider == OVERLAY else "accelerate ops off"
            bars = axes.bar(at, middle, 0.38, yerr=spread, capsize=4, color=_COLOURS[provider], label=label)
            axes.bar_label(
                bars, [f"{value:,.3g}" if value < 100 else f"{value:,.0f}" for value in middle], padding=2
            )
        axes.set_xticks(range(len(names)), names)
        axes.set_title(title, fontsize=10)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False)
    environment, serving = result["environment"], result["serving"]
    figure.suptitle(
        f"vLLM {environment['vllm']}, {serving['model']}: median, least and most of {serving['runs']} runs\n"
        f"{environment['gpu']}, {environment['date'][:10]}",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"serving.{suffix}" for suffix in ("png", "svg")]
    figure.savefig(paths[0], dpi=120, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot.close(figure)
    return paths


def _group(row: Row) -> str:
    if row["workload"] == "prefill":
        return f"{row['case']['input_tokens']:,} tokens"
    return f"{row['case']['streams']} stream{'s' if row['case']['streams'] > 1 else ''}"


def main(argv: list[str] | None = None) -> int:
    """Rewrites, or checks, and draws."""
    from deepinfer_cli.validate import results

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether the tables are current")
    parser.add_argument("--chart", action="store_true", help="also draw the chart")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("--folder", type=Path, help="for the chart; default: beside the summary")
    parser.add_argument("--file", type=Path, action="append", help="with the markers; default: both READMEs")
    options = parser.parse_args(argv)
    result = results.read(options.summary)
    stale = []
    for path in options.file or FILES:
        text = path.read_text(encoding="utf-8")
        fresh = report.rewritten(text, (BEGIN, END), content(result))
        if fresh != text:
            stale.append(path)
            if not options.check:
                path.write_text(fresh, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'not current' if options.check else 'rewritten'}")
    if options.chart:
        for path in draw(result, options.folder or options.summary.parent):
            print(path)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
