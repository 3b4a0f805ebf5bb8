"""The plan as a picture: memory of each GPU by part, and the KV pool, against the layouts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_cli.errors import UnsupportedError, UsageError

# a palette that colour-blind readers can tell apart (Okabe and Ito), then greys
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#88ccaa", "#e69f00", "#f0e442", "#d55e00", "#cc79a7",
            "#444444", "#777777", "#999999", "#bbbbbb")  # fmt: skip
_KV = "#dddddd"
_MOST = 12


def check(path: Path) -> None:
    """Refuses what cannot be drawn, before anything is done.

    Raises:
        UsageError: neither PNG nor SVG.
        UnsupportedError: there is no matplotlib (`matplotlib-missing`).
    """
    if path.suffix not in (".png", ".svg"):
        raise UsageError(
            f"--chart {path}: neither .png nor .svg", code="usage", hint=f"--chart {path.stem or 'plan'}.png"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "a chart needs matplotlib, which is not installed here",
            code="matplotlib-missing",
            hint="pip install 'deepinfer[bench]', or leave --chart out",
        ) from error


def draw(data: dict[str, Any], suffix: str) -> bytes:
    """The file's bytes.

    Args:
        data: the plan's JSON data.
        suffix: `.png` or `.svg`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # the same plan is the same file
    matplotlib.rcParams.update({"svg.hashsalt": "deepinfer", "svg.fonttype": "none", "font.size": 9})
    shown = _shown(data)
    bars = [(one, index, stage) for one in shown for index, stage in enumerate(one["stages"], 1)]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(14, 0.8 + 0.32 * max(len(bars), 6)), width_ratios=(2, 1)
    )
    figure.subplots_adjust(wspace=0.75)
    _memory(left, bars, data)
    _pools(right, shown)
    load = data["load"]
    title = (
        f"DeepSeek-V4.1 on {data['gpus']} x {data['gpu_memory_gib']:g} GiB, vLLM {load['release']}, "
        f"{load['batched_tokens']:,} batched tokens (planned, not measured)"
    )
    why = "; ".join(data["layout"]["refused"])
    left.set_title(title + (f"\nrefused by vLLM {load['release']}: {why}" if why else ""), loc="left")
    stream = io.BytesIO()
    metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
    figure.savefig(stream, format=suffix[1:], dpi=140, metadata=metadata, bbox_inches="tight")
    pyplot.close(figure)
    return stream.getvalue()


def _shown(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The layouts that serve or would; with none those that come nearest."""
    serving = [one for one in data["layouts"] if one["status"].startswith("serves")]
    near = sorted(data["layouts"], key=lambda one: max(stage["sum_gib"] for stage in one["stages"]))
    return (serving or near[:4])[:_MOST]


def _memory(axes: Any, bars: list[tuple[dict[str, Any], int, dict[str, Any]]], data: dict[str, Any]) -> None:
    """One stacked bar for each stage of each layout."""
    names = [
        f"{one['name']}, stage {index}" if len(one["stages"]) > 1 else one["name"] for one, index, _ in bars
    ]
    places = range(len(bars))
    start = [0.0] * len(bars)
    for part, colour in zip(bars[0][2]["parts_gib"], _COLOURS, strict=False):
        sizes = [stage["parts_gib"][part] for _, _, stage in bars]
        if max(sizes) >= 0.05:
            axes.barh(places, sizes, left=start, color=colour, label=part, height=0.7)
        start = [before + size for before, size in zip(start, sizes, strict=True)]
    left = [stage["kv_gib"] for _, _, stage in bars]
    axes.barh(places, left, left=start, color=_KV, label="KV cache", height=0.7)
    axes.axvline(bars[0][0]["usable_gib"], color="black", linewidth=1)
    axes.axvline(data["gpu_memory_gib"], color="black", linewidth=1, linestyle=":")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of one GPU; line: vLLM's share of what CUDA sees, dots: the card in nvidia-smi")
    axes.margins(y=0.02)
    low = -0.75 / axes.figure.get_figheight()
    axes.legend(loc="upper left", bbox_to_anchor=(-0.3, low), ncols=7, frameon=False, fontsize=8)


def _pools(axes: Any, shown: list[dict[str, Any]]) -> None:
    """The pool of each layout, with the contexts that it is."""
    places = range(len(shown))
    sizes = [one["pool"]["tokens"] / 1e6 for one in shown]
    colours = ["#0072b2" if one["status"].startswith("serves") else _KV for one in shown]
    axes.barh(places, sizes, color=colours, height=0.7)
    texts = [axes.text(sizes[place], place, _label(one), va="center") for place, one in enumerate(shown)]
    axes.set_yticks(places, [one["name"] for one in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, _width(axes, sizes, texts))
    axes.locator_params(axis="x", nbins=4)
    if not any(sizes):
        axes.set_xticks([0])
    axes.set_xlabel("KV pool, million tokens")


def _label(one: dict[str, Any]) -> str:
    """How many contexts the pool holds, and what there is to say of it."""
    contexts = f" {one['pool']['contexts']:.2f} x {one['context']:,}" if one["pool"]["tokens"] else ""
    said = {"serves": "", "serves, within what is uncertain of this estimate": " (uncertain)"}
    return contexts + said.get(one["status"], f" {one['status']}")


def _width(axes: Any, sizes: Sequence[float], texts: Sequence[Any]) -> float:
    """The end of the axis that leaves room for what stands beside each bar."""
    shares = [text.get_window_extent().width / axes.bbox.width for text in texts]
    return max(size / max(0.97 - share, 0.2) for size, share in zip(sizes, shares, strict=True)) or 1.0
