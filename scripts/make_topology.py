#!/usr/bin/env python3
"""Writes the figures of docs/05_TOPOLOGY_1M_CONTEXT_ANALYSIS_SM80.md anew, each from the `deepinfer plan` it names."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deepinfer_cli import app
from deepinfer_cli.planner.weights import PARTS

DOCUMENT = Path(__file__).parents[1] / "docs" / "05_TOPOLOGY_1M_CONTEXT_ANALYSIS_SM80.md"
# GiB, as nvidia-smi shows them
CARDS = (24, 40, 48, 64, 80)
# the cards whose commands are shown; the others' differ in --gpu-memory alone
SHOWN = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One layout: its name in the table, GPUs, and the options that explain it."""

    name: str
    gpus: int
    layout: str
    more: str = ""

    def command(self, card: int) -> str:
        """The line that a reader types."""
        line = f"deepinfer plan --gpus {self.gpus} --gpu-memory {card} --layout {self.layout} {self.more}"
        return line.strip()


ROWS = (
    Row("TP8", 8, "tp8", "--no-expert-parallel"),
    Row("TP8, whole experts", 8, "tp8", "--expert-parallel"),
    Row("TP8 x PP2 (20,20)", 16, "tp8pp2", "--no-expert-parallel"),
    Row("TP8 x PP2 (20,20), whole experts", 16, "tp8pp2", "--expert-parallel"),
    Row("TP4 x PP2 (20,20)", 8, "tp4pp2", "--no-expert-parallel"),
    Row("TP4 x PP2 (20,20), whole experts", 8, "tp4pp2", "--expert-parallel"),
    Row("TP4 x PP2 (14,26)", 8, "tp4pp2", "--partition 14,26 --no-expert-parallel"),
    Row("TP2 x PP3 (14,6,20)", 6, "tp2pp3", "--partition 14,6,20"),
    Row("TP2 x PP3 (14,14,12)", 6, "tp2pp3", "--partition 14,14,12"),
    Row("PP4 (8,6,6,20)", 4, "pp4", "--partition 8,6,6,20"),
    Row("PP6 (6,7,7,7,7,6)", 6, "pp6", "--partition 6,7,7,7,7,6"),
    Row("TP2 + TP4 (14,26)", 6, "tp2+tp4", "--partition 14,26 --no-expert-parallel"),
    Row("TP2 + TP4 (14,26), whole experts", 6, "tp2+tp4", "--partition 14,26 --expert-parallel"),
)
COUNTS = (6, 8, 10, 16)
# eight cards, one stage: what each setting does to the pool
BASE = Row("TP8", 8, "tp8", "--no-expert-parallel --context 524288")
LEVERS = (
    "",
    "--max-num-batched-tokens 2048",
    "--gpu-memory-utilization 0.95",
    "--max-num-seqs 16",
    "--no-vision",
    "--speculative-tokens 0",
    "--expert-parallel",
)
# the pools that the authors of the original published for six cards of 64 GB; how they served is not, so it is assumed
ASSUMED_SHARE, SHARES = 0.96, (0.97, 0.98)
ASSUMED = (
    "--context 1048576 --max-num-batched-tokens 2048 --max-num-seqs 16 "
    f"--gpu-memory-utilization {ASSUMED_SHARE}"
)
PUBLISHED = (
    (
        Row("TP2 x PP3 (14,14,12)", 6, "tp2pp3", f"--partition 14,14,12 {ASSUMED}"),
        "4,648,480 tokens, 4.43 contexts",
        4_648_480,
    ),
    (
        Row("PP6 (7,7,7,7,7,5)", 6, "pp6", f"--partition 7,7,7,7,7,5 {ASSUMED}"),
        "4.5 to 4.7 million; partition not named",
        4_600_000,
    ),
    (
        Row(
            "TP2 + TP4 (14,26), whole experts", 6, "tp2+tp4", f"--partition 14,26 --expert-parallel {ASSUMED}"
        ),
        "about 6 million; partition not named",
        6_000_000,
    ),
)


@cache
def plan(command: str) -> tuple[int, dict[str, Any]]:
    """Exit code and data of a `deepinfer plan` line, for vLLM 0.33.0 and without asking an installed one."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = app.main([*shlex.split(command)[1:], "--vllm", "0.33.0", "--no-check", "--json"])
    return code, json.loads(out.getvalue())["data"]


def cell(command: str) -> str:
    """Pool and contexts, or what is missing on the fullest GPU."""
    code, data = plan(command)
    return cell_of(code, data["layout"])


def cell_of(code: int, layout: dict[str, Any]) -> str:
    """The same of a plan."""
    pool = layout["pool"]
    if code == 0:
        return f"{millions(pool['tokens'])}, {pool['contexts']:.1f} x {layout['context']:,}"
    most = max(stage["sum_gib"] for stage in layout["stages"])
    if most > layout["usable_gib"]:
        return f"no: {most:.1f} of {layout['usable_gib']:.1f} GiB"
    return "no room for one context"


def millions(tokens: int) -> str:
    """Such as `7.9 M`."""
    return f"{tokens / 1e6:.1f} M"


def layouts() -> str:
    """Every layout on every card."""
    head = ["Layout", "GPUs", "Starts on", *(f"{card} GB cards" for card in CARDS)]
    lines = [head, ["---"] * 2 + ["---"] + ["---:"] * len(CARDS)]
    for row in ROWS:
        cells = [cell(row.command(card)) for card in CARDS]
        lines.append([row.name, str(row.gpus), needs(row), *cells])
    return table(lines)


def needs(row: Row) -> str:
    """Which vLLM starts it."""
    names = {"stock": "stock", "overlay": "the overlay"}
    return ", ".join(names[one] for one in plan(row.command(SHOWN))[1]["starts_on"]) or "**neither**"


def commands() -> str:
    """The lines behind the column of `SHOWN`, in blocks by exit code."""
    blocks = []
    for code in (0, 3):
        lines = [row.command(SHOWN) for row in ROWS if plan(row.command(SHOWN))[0] == code]
        mark = f"<!-- exit: {code} -->\n" if code else ""
        blocks.append(f"{mark}```sh\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(blocks)


def best() -> str:
    """What is recommended for each number of each card."""
    lines = [["GPUs", *(f"{card} GB cards" for card in CARDS)], ["---:"] + ["---"] * len(CARDS)]
    for gpus in COUNTS:
        cells = []
        for card in CARDS:
            code, data = plan(f"deepinfer plan --gpus {gpus} --gpu-memory {card}")
            name = data["layout"]["name"].replace("with expert parallelism", "EP")
            cells.append(f"{name}: {cell_of(code, data['layout'])}" if code == 0 else "nothing")
        lines.append([str(gpus), *cells])
    return table(lines)


def levers() -> str:
    """The pool of one layout under other settings."""
    lines = [
        ["TP8 on eight cards of 64 GB, context 524,288", "Pool (tokens)", "Contexts"],
        ["---", "---:", "---:"],
    ]
    for option in LEVERS:
        base = BASE.command(SHOWN)
        if option == "--expert-parallel":
            base = base.replace("--no-expert-parallel ", "")
        pool = plan(f"{base} {option}".strip())[1]["layout"]["pool"]
        lines.append(
            [
                f"`{option}`" if option else "as `plan` takes it",
                f"{pool['tokens']:,}",
                f"{pool['contexts']:.2f}",
            ]
        )
    return table(lines) + f"\n\n```sh\n{BASE.command(SHOWN)}\n```"


def published() -> str:
    """Pools that others published, beside ours, and the differences with a little more of the card."""
    head = ["Layout", "Published", "`plan`", "Contexts", "Difference", *(f"with {share}" for share in SHARES)]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]
    for row, said, tokens in PUBLISHED:
        pool = plan(row.command(SHOWN))[1]["layout"]["pool"]
        lines.append(
            [
                row.name,
                said,
                f"{pool['tokens']:,}",
                f"{pool['contexts']:.2f}",
                *(f"{100 * ratio(row, tokens, share) - 100:+.0f} %" for share in (ASSUMED_SHARE, *SHARES)),
            ]
        )
    return table(lines) + "\n\n```sh\n" + "\n".join(row.command(SHOWN) for row, *_ in PUBLISHED) + "\n```"


def ratio(row: Row, tokens: int, share: float = ASSUMED_SHARE) -> float:
    """The pool of `plan` over `tokens` that were published, with that share of the card."""
    command = row.command(SHOWN).replace(f"utilization {ASSUMED_SHARE}", f"utilization {share}")
    return float(plan(command)[1]["layout"]["pool"]["tokens"] / tokens)


def table(rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def parts(*names: str) -> str:
    """Memory by part on a GPU of each stage, for rows of the table on cards of `SHOWN` GB."""
    found = [(row, plan(row.command(SHOWN))[1]["layout"]) for row in ROWS if row.name in names]
    columns = [(row, layout, index) for row, layout in found for index in range(len(layout["stages"]))]
    head = ["GiB"]
    for row, layout, index in columns:
        first, last = layout["stages"][index]["layers"]
        head.append(row.name if len(layout["stages"]) == 1 else f"{row.name}: layers {first} to {last}")
    lines = [head, ["---", *("---:" for _ in columns)]]
    known = columns[0][1]["stages"][0]["parts_gib"]
    for part in (*PARTS, *(name for name in known if name not in PARTS)):
        lines.append([part, *(f"{layout['stages'][i]['parts_gib'][part]:.2f}" for _, layout, i in columns)])
    lines.append(["**without KV**", *(f"{layout['stages'][i]['sum_gib']:.2f}" for _, layout, i in columns)])
    lines.append(["KV", *(f"{max(layout['stages'][i]['kv_gib'], 0):.2f}" for _, layout, i in columns)])
    return table(lines)


SECTIONS = {
    "best": best,
    "layouts": layouts,
    "commands": commands,
    "levers": levers,
    "parts": lambda: parts("TP8", "TP2 x PP3 (14,14,12)"),
    "published": published,
}
_SECTION = re.compile(r"(<!-- plan:begin (\w+) -->\n).*?(\n<!-- plan:end -->)", re.DOTALL)


def render(text: str) -> str:
    """The document with every section made anew."""
    return _SECTION.sub(lambda found: found[1] + SECTIONS[found[2]]() + found[3], text)


def main() -> int:
    """Writes the document, or with `--check` only says whether it is as it would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if figures are old")
    asked = parser.parse_args()
    before = DOCUMENT.read_text(encoding="utf-8")
    after = render(before)
    if asked.check:
        print("current" if before == after else "old: run this without --check")
        return int(before != after)
    DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
