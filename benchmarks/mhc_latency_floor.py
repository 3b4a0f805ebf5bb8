#!/usr/bin/env python3
"""How fast can `mhc_fused_post_pre_delayed` be at 12 tokens? Times skeletons that do a part of its work, and no more.

The op cannot be done in less than: a launch, a read of all inputs from memory, sums over all CTAs, and then the chain of
20 dependent normalisations. Each skeleton does some of these steps with less work than the op (no tensor cores, no
norm, no sigmoids; what it adds up means nothing), at several grids, of which the fastest counts. A skeleton above the
target shows that a kernel of its form cannot reach it; it says nothing of other forms.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "overlays"), str(ROOT / "benchmarks")]
SUMMARY = ROOT / "benchmarks" / "results" / "sm80_benchmark_summary.json"
# options are read before Triton is imported, so that it compiles for the asked architecture
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--arch", choices=("sm80", "sm86", "sm89"), help="measure its code on a newer card")
PARSER.add_argument("--output", type=Path, help="result file to write")
OPTIONS = PARSER.parse_args() if __name__ == "__main__" else None
if OPTIONS and OPTIONS.arch:
    os.environ["TRITON_OVERRIDE_ARCH"] = OPTIONS.arch

import torch  # noqa: E402
from mhc_skeletons import chain, empty, first, second  # noqa: E402

from deepinfer_cli.validate import environment, results, timing  # noqa: E402

OP, FACTOR = "mhc_fused_post_pre_delayed", 2.89
TOKENS, HIDDEN, MIXES, ITERATIONS = 12, 5120, 24, 20
SUMS = TOKENS * MIXES
# columns of a CTA and its warps
GRIDS = ((32, 4), (64, 4), (128, 4), (128, 8))
FAST = os.environ.get("TRITON_INTERPRET") != "1"  # the interpreter has no inline assembly


def inputs(device: str) -> dict[str, torch.Tensor]:
    """What the op reads and writes at 12 tokens, and scratch."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    made = {"fn": normal(96 * HIDDEN) * 0.01, "residual": normal(4 * TOKENS * HIDDEN).bfloat16(),
            "x": normal(TOKENS * HIDDEN).bfloat16(), "mixes": normal(SUMS)}  # fmt: skip
    made |= {"new": torch.zeros_like(made["residual"]), "layer_input": torch.zeros_like(made["x"])}
    made |= {
        name: torch.zeros(size) for name, size in (("parts", 160 * SUMS), ("sums", 512), ("out", TOKENS * 16))
    }
    made["counters"] = torch.zeros(16 * 32, dtype=torch.int32)
    return {name: value.to(device) for name, value in made.items()}


def expected(given: dict[str, torch.Tensor], columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts `[HIDDEN / columns, 288]` and the scaled cells `[12, 4, 4]`, in float64."""
    count = HIDDEN // columns
    total = torch.zeros(count, 256, dtype=torch.float64)
    for name in ("fn", "residual", "x", "mixes"):
        source = given[name].cpu().double()
        lines = (
            source.expand(count, -1)
            if name == "mixes"
            else source.view(-1, count, columns).transpose(0, 1).flatten(1)
        )
        total += torch.nn.functional.pad(lines, (0, -lines.shape[1] % 256)).view(count, -1, 256).sum(1)
    parts = torch.cat((total, total[:, : SUMS - 256]), 1)
    return parts, scaled(parts.sum(0))


def scaled(sums: torch.Tensor) -> torch.Tensor:
    """The chain in plain steps: columns once, then rows and columns 19 times."""
    cells = sums.view(TOKENS, MIXES)[:, 8:].reshape(TOKENS, 4, 4).abs() + 1
    for turn in range(2 * ITERATIONS - 1):
        cells = cells / cells.sum(1 if turn % 2 == 0 else 2, keepdim=True)
    return cells


def one(mode: int, columns: int, warps: int, given: dict[str, torch.Tensor], copy: bool = False) -> None:
    """`first` in one launch."""
    names = ("fn", "residual", "x", "mixes", "new", "layer_input", "parts", "sums", "out", "counters")
    first[(HIDDEN // columns + (TOKENS if mode == 2 else 0),)](
        *(given[name] for name in names),
        mode,
        copy,
        columns,
        HIDDEN,
        TOKENS,
        ITERATIONS,
        FAST,
        num_warps=warps,
    )


def two(columns: int, warps: int, given: dict[str, torch.Tensor], copy: bool = False) -> None:
    """The parts, then in a second launch the rest, one CTA of one warp for each token."""
    one(0, columns, warps, given, copy)
    second[(TOKENS,)](given["parts"], given["out"], HIDDEN // columns, SUMS, ITERATIONS, FAST, num_warps=1)


def last(given: dict[str, torch.Tensor]) -> None:
    """The chain alone, for 12 tokens in one CTA of one warp."""
    chain[(1,)](given["sums"], given["out"], TOKENS, ITERATIONS, FAST, num_warps=1)


def launches(count: int, _given: dict[str, torch.Tensor]) -> None:
    """So many empty launches."""
    for _ in range(count):
        empty[(1,)]()


def skeletons() -> dict[tuple[str, int, int], Any]:
    """(what, columns, warps) → call."""
    made: dict[tuple[str, int, int], Any] = {
        ("one empty launch", 0, 1): partial(launches, 1),
        ("two empty launches", 0, 1): partial(launches, 2),
        ("normalisations alone", 0, 1): last,
    }
    for grid in GRIDS:
        made[("read the inputs, leave parts", *grid)] = partial(one, 0, *grid)
        made[("read the inputs, write parts and rows", *grid)] = partial(one, 0, *grid, copy=True)
        made[("two launches", *grid)] = partial(two, *grid)
        made[("two launches, rows written", *grid)] = partial(two, *grid, copy=True)
        for mode, text in enumerate(
            ("last CTA finishes", "waiting CTAs finish", "atomic sums, last CTA finishes"), 1
        ):
            made[(f"one launch, {text}", *grid)] = partial(one, mode, *grid)
            made[(f"one launch, {text}, rows written", *grid)] = partial(one, mode, *grid, copy=True)
    return made


def check(name: str, columns: int, call: Any, given: dict[str, torch.Tensor]) -> None:
    """Raises AssertionError where a skeleton's sums or cells, made twice over the same scratch, are not torch's."""
    if "empty" in name:
        return
    parts, cells = expected(given, columns or 64)
    given["parts"].fill_(float("nan"))
    for _ in range(2):
        given["sums"].zero_()
        if not columns:
            given["sums"][:SUMS] = parts.sum(0).to(given["sums"])
        given["out"].fill_(float("nan"))
        call(given)
        if columns and "atomic" not in name:
            found = given["parts"][: parts.numel()].cpu().double().view_as(parts)
            torch.testing.assert_close(found, parts, rtol=1e-4, atol=1e-3)
        if "read" not in name:
            torch.testing.assert_close(
                given["out"].cpu().double().view_as(cells), cells, rtol=1e-3, atol=1e-4
            )
    if "rows" in name:
        assert torch.equal(given["new"], given["residual"]) and torch.equal(given["layer_input"], given["x"])
    given["sums"].zero_()


def main() -> int:
    """Checks, times, prints and writes."""
    rows = [
        row for row in results.read(SUMMARY)["rows"] if row["op"] == OP and row["case"]["tokens"] == TOKENS
    ]
    ours, stock = (
        next(row["latency_us"]["p50"] for row in rows if row["provider"] == name)
        for name in ("overlay", "stock")
    )
    target = stock / FACTOR
    calls, given = skeletons(), inputs("cuda")
    for (name, columns, _warps), call in calls.items():
        check(name, columns, call, given)
    sets = timing.input_sets(given, sum(given[name].nbytes for name in ("fn", "residual", "x")))
    times = timing.alternate({key: timing.GraphTimer(call, sets) for key, call in calls.items()})
    for (name, columns, _warps), call in calls.items():
        check(name, columns, call, sets[-1])
    found = [
        {"skeleton": name, "columns": columns or None, "ctas": HIDDEN // columns if columns else None, "warps": warps,
         "latency_us": us, "left_us": round(target - us["p50"], 3)}
        for (name, columns, warps), us in times.items()
    ]  # fmt: skip
    print(
        f"{OP}, {TOKENS} tokens: stock {stock:.2f} us, ours {ours:.2f} us, {FACTOR}x is {target:.2f} us; fastest grids:"
    )
    for name in dict.fromkeys(row["skeleton"] for row in found):
        best = min(
            (row for row in found if row["skeleton"] == name), key=lambda row: row["latency_us"]["p50"]
        )
        print(
            f"{name:60} {best['latency_us']['p50']:6.2f} us  left {best['left_us']:6.2f} us  CTAs {best['ctas'] or '-'} x {best['warps']} warps"
        )
    if OPTIONS.output:
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = environment.describe() | {
            "commit": os.environ.get("COMMIT"),
            "date": date,
            "arch": OPTIONS.arch,
        }
        target_us = {"stock": stock, "ours": ours, "factor": FACTOR, "target": round(target, 3)}
        document = {"schema_version": results.SCHEMA_VERSION, "environment": about, "rows": []}
        results.write(document | {"target_us": target_us, "skeletons": found}, OPTIONS.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
