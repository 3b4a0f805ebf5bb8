"""docs/doctor.md states what the functions compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_cli.planner import buffers, weights
from deepinfer_cli.planner.shape import FLASH
from deepinfer_cli.serve import memory
from deepinfer_cli.serve.advice import advise
from deepinfer_cli.serve.memory import Layout, Load

DOC = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "gpus", "gib"),
    [
        ("8 x A100 80 GB", 8, 80),
        ("4 x A100 80 GB", 4, 80),
        ("8 x A100 40 GB", 8, 40),
        ("16 x A100 40 GB", 16, 40),
        ("8 x A6000 48 GB", 8, 48),
        ("4 x A6000 48 GB", 4, 48),
        ("8 x RTX 3090 24 GB", 8, 24),
        ("16 x RTX 3090 24 GB", 16, 24),
    ],
)
def test_the_table(name: str, gpus: int, gib: int) -> None:
    row = next(line for line in DOC.splitlines() if line.startswith(f"| {name} |"))
    advice = advise(gpus, gib)
    if advice.best is None:
        assert all(text in row for text in advice.nearest)
        total = advice.reasons[1].rpartition(" = ")[2].partition(" (")[0]
        assert f"| nothing: {total} without KV in the best layout" in row
        return
    best = advice.best
    assert f"{best.layout.name}: {best.stages[best.tightest].total:.1f} of {best.usable:.1f} GiB" in row
    assert f"context {advice.load.context:,}, pool {best.tokens / 1e6:.1f} million tokens" in row


@pytest.mark.parametrize(("gpus", "gib"), [(8, 80), (8, 48)])
def test_the_lines(gpus: int, gib: int) -> None:
    line = advise(gpus, gib).line
    assert line is not None and f"\n{line}\n" in DOC


def test_what_cuda_sees_and_how_narrow_the_fit_of_48_is() -> None:
    large, *others = (f"{memory.cuda_sees(gib):.2f} of {gib}" for gib in (80, 48, 40, 24))
    assert f"about {large} GiB, {', '.join(others)}." in DOC
    best = advise(8, 48).best
    assert best is not None and f"{best.pool.concurrency:.2f} contexts of {best.pool.context:,}" in DOC
    assert not memory.estimate(best.layout, 48 - 0.12, Load(context=best.pool.context)).serves()
    assert advise(8, 45).best is None


def workspace(load: Load) -> float:
    return buffers.workspace(FLASH, range(FLASH.layers), load.traffic, load.release) / memory.GIB


def test_the_figures_in_the_text() -> None:
    whole = (weights.checkpoint(FLASH) - weights.tables(FLASH)) / memory.GIB
    sliced, kept = (weights.Split(8, expert_parallel=kept) for kept in (False, True))
    padding = FLASH.layers * weights.experts(FLASH, FLASH.experts) / 8 / memory.GIB
    padding *= weights.expert_padding(FLASH, sliced) - weights.expert_padding(FLASH, kept)
    assert f"{whole:.1f} GiB" in DOC and f"{padding:.1f} GiB more" in DOC
    assert (
        f"{workspace(Load()):.1f} GiB at 1,048,576; {workspace(Load('0.31.0')):.1f} in 0.30"
        in DOC.replace("\n", " ")
    )
    stored = weights.stage(FLASH, range(40), weights.Split(stored=True, draft=True), first=True, last=True)
    for part, size in stored.items():
        if part not in ("mixing", "Engram"):
            assert f"{size / memory.GIB:.1f}" in DOC, part
    host = memory.estimate(Layout(8), 80, Load()).host
    assert f"so the tables take {host.rounded:.0f} GiB" in DOC
