#!/usr/bin/env python3
"""Draws the summary: latency, speed-up and share of the ceiling, one figure per group of ops, as PNG and SVG.

Needs matplotlib (`pip install 'deepinfer[bench]'`). The figures go to benchmarks/results/charts/.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import report
from microbench import SUMMARY
from report import Row

FOLDER = SUMMARY.parent / "charts"
# a palette that colour-blind readers can tell apart (Okabe and Ito)
_COLOURS = {
    "overlay sm80": "#0072b2",
    "overlay sm80, 48 KB": "#56b4e9",
    "overlay sm86": "#009e73",
    "overlay sm86, 48 KB": "#88ccaa",
    "stock": "#d55e00",
    "stock-sm80": "#e69f00",
    "stock-0.30-grid": "#7f7f7f",
    "torch": "#7f7f7f",
}
_MARKERS = {"overlay": "o", "stock": "s", "stock-sm80": "^"}
_COLUMNS = 3
# params that make a panel of their own, and their words in its title
_WORDS = {"heads": "{} heads", "width": "{} columns", "layout": "{}"}
_SPLIT = tuple(_WORDS)
# neighbouring ticks closer than this share of an axis would touch
_TICK_SPACE = 0.11
# speed-ups above this are drawn on a logarithmic axis
_LOG_FROM = 12.0

Panel = tuple[str, list[Row]]
Draw = Callable[[Any, list[Row], list[Row]], None]


def panels(rows: list[Row], ops: tuple[str, ...]) -> Iterator[Panel]:
    """Title and rows of each panel: an op, once for each number of heads, layout or width that has several sizes."""
    for op in ops:
        parts: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            if row["op"] == op and row["timing"] == "graph":
                parts.setdefault(tuple(row["case"].get(key) for key in _SPLIT), []).append(row)
        for values, part in parts.items():
            words = [
                _WORDS[key].format(value)
                for key, value in zip(_SPLIT, values, strict=True)
                if value is not None
            ]
            # what is measured at one size only is in the tables
            if len({row["case"].get(report.TOKENS) for row in part}) > 1:
                yield ", ".join([op, *words]), part


def series(rows: list[Row]) -> dict[str, list[tuple[int, Row]]]:
    """Name → (tokens, row), ascending; one series for each provider, and for each code of the overlay's."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if not row["latency_us"] or report.TOKENS not in row["case"]:
            continue
        ours = row["provider"] == "overlay"
        name = f"overlay {report.code_text(row)}" if ours else row["provider"]
        # a baseline is measured again with each kind of our code: the first is as good as any
        found.setdefault(name, {}).setdefault(row["case"][report.TOKENS], row)
    order = sorted(
        found,
        key=lambda name: (
            not name.startswith("overlay"),
            list(_COLOURS).index(name) if name in _COLOURS else 99,
        ),
    )
    return {name: sorted(found[name].items()) for name in order}


def latency(axes: Any, rows: list[Row], _all_rows: list[Row]) -> None:
    """Lines over the number of tokens, both axes logarithmic."""
    for name, points in series(rows).items():
        _line(axes, name, [(tokens, row["latency_us"]["p50"]) for tokens, row in points])
    _logarithmic(axes)
    axes.set_ylabel("latency (µs)")


def speedup(axes: Any, rows: list[Row], all_rows: list[Row]) -> None:
    """How many times faster than stock, with what the original's authors published as crosses.

    Where vLLM 0.30 ran something else, a thin line is over that: it is what the published figures are over.
    """
    old = report.OLD.get(rows[0]["op"], "")
    highest, claims = 1.0, {}
    for name, points in series([row for row in rows if row["provider"] == "overlay"]).items():
        for baseline, style in (("stock", {}), (old, {"linewidth": 0.8, "markersize": 3})):
            ratios = [(tokens, report.ratio(all_rows, row, baseline)) for tokens, row in points]
            measured = [(tokens, value) for tokens, value in ratios if value is not None]
            label = name if baseline == "stock" else f"{name}, over 0.30's"
            _line(axes, name, measured, label=label, **style)
            highest = max([highest, *(value for _, value in measured)])
        claims |= {tokens: report.published(row["op"], row["case"]) for tokens, row in points}
    claimed = [(tokens, found["speedup"]) for tokens, found in sorted(claims.items()) if found]
    if claimed:
        axes.plot(
            *zip(*claimed, strict=True), "kx", markersize=8, markeredgewidth=2, label="published, A100-class"
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    if highest > _LOG_FROM:
        _logarithmic(axes)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("times faster than stock")


def ceiling(axes: Any, rows: list[Row], _all_rows: list[Row]) -> None:
    """Share of what the card can do: filled markers where copying memory binds, hollow ones where `mma.sync` does."""
    for name, points in series([row for row in rows if row["provider"] in ("overlay", "stock")]).items():
        # a baseline in the card's own code has no share of an sm80 ceiling
        points = [(tokens, row) for tokens, row in points if row["ceiling_fraction"] is not None]
        shares = [(tokens, 100 * row["ceiling_fraction"]) for tokens, row in points]
        _line(axes, name, shares)
        hollow = [
            share for share, (_, row) in zip(shares, points, strict=True) if row.get("ceiling") == "mma"
        ]
        if hollow:
            axes.plot(*zip(*hollow, strict=True), _marker(name), color=_colour(name), markerfacecolor="white")
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of the ceiling")


KINDS: dict[str, tuple[str, Draw]] = {
    "latency": ("Latency of one call, median of CUDA-graph replays", latency),
    "speedup": ("Speed-up over stock vLLM on the same card", speedup),
    "ceiling": ("Share of the measured ceiling (hollow: mma.sync binds; filled: memory copy binds)", ceiling),
}


def _line(axes: Any, name: str, points: list[tuple[int, float]], **style: Any) -> None:
    if points:
        look = {
            "linestyle": "--" if name.endswith("KB") else "-",
            "color": _colour(name),
            "label": name,
            "markersize": 5,
        }
        axes.plot(*zip(*points, strict=True), marker=_marker(name), **(look | style))


def _logarithmic(axes: Any) -> None:
    """A logarithmic y axis whose ticks are plain numbers."""
    from matplotlib import ticker

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # one decade has too few powers of ten to read values by
    subs = (1.0, 2.0, 5.0) if high / low < 300 else (1.0,)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _position: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _marker(name: str) -> str:
    return _MARKERS.get("overlay" if name.startswith("overlay") else name, "d")


def _colour(name: str) -> str:
    return _COLOURS.get(name, "#444444")


def draw(result: dict[str, Any], group: str, kind: str, folder: Path) -> list[Path]:
    """One figure; nothing where the group was not measured."""
    import matplotlib

    matplotlib.use("Agg")
    # the same summary gives the same files
    matplotlib.rcParams.update(
        {"svg.hashsalt": "deepinfer", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    )
    from matplotlib import pyplot

    group_title, ops = report.GROUPS[group]
    shown = [panel for panel in panels(result["rows"], ops) if kind != "speedup" or _has_stock(panel)]
    if not shown:
        return []
    columns = 2 if len(shown) == 4 else min(_COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    figure, grid = pyplot.subplots(lines, columns, figsize=(4.2 * columns, 3.2 * lines + 0.9), squeeze=False)
    text, how = KINDS[kind]
    for axes, (title, rows) in zip(grid.flat, shown, strict=False):
        how(axes, rows, result["rows"])
        sizes = sorted({row["case"][report.TOKENS] for row in rows if report.TOKENS in row["case"]})
        axes.set_xscale("log", base=2)
        _ticks(axes, sizes)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens")
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    labels = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        labels.values(), labels.keys(), loc="lower center", ncols=min(6, len(labels) or 1), frameon=False
    )
    environment = result["environment"]
    figure.suptitle(f"{group_title}: {text}\n{environment['gpu']}, {environment['date'][:10]}", fontsize=11)
    figure.tight_layout(rect=(0, 0.25 / (lines + 0.3) / 2.2, 1, 1.0))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{kind}_{group}.{suffix}" for suffix in ("png", "svg")]
    figure.savefig(paths[0], dpi=120, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot.close(figure)
    return paths


def _has_stock(panel: Panel) -> bool:
    return any(row["provider"] == "stock" and row["latency_us"] for row in panel[1])


def _ticks(axes: Any, sizes: list[int]) -> None:
    """Sizes that were measured, the smallest, the largest and as many between as can be read."""
    from matplotlib import ticker

    span = math.log(sizes[-1] / sizes[0]) or 1.0
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if math.log(kept[-1] / size) / span >= _TICK_SPACE:
            kept.append(size)
    axes.xaxis.set_major_locator(ticker.FixedLocator(kept))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _position: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def main(argv: list[str] | None = None) -> int:
    """Draws every figure that the summary has rows for."""
    from deepinfer_cli.validate import results

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(argv)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("error: matplotlib is missing; pip install 'deepinfer[bench]'", file=sys.stderr)
        return 3
    result = results.read(options.summary)
    for group in report.GROUPS:
        for kind in KINDS:
            for path in draw(result, group, kind, options.folder):
                print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
