#!/usr/bin/env python3
"""Rewrites the end-to-end tables between the markers of docs/03_VALIDATION.md, from the summary of `scripts/gpu_e2e.py`.

`--check` changes nothing and exits 1 if they are not current.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import report
from microbench import ROOT

SUMMARY = ROOT / "benchmarks" / "results" / "checks" / "e2e_2026-11-30.json"
PAGE = ROOT / "docs" / "03_VALIDATION.md"
BEGIN, END = "<!-- e2e:begin -->", "<!-- e2e:end -->"
# places in a finding of the summary
KIND, LENGTH, MEAN, RMS, P99 = 0, 2, 3, 4, 5
# from this many tokens on a prompt's mean is steady
STEADY = 130


def tables(summary: dict[str, Any]) -> str:
    """Runs, planted faults, and what the accelerate group gains."""
    environment = summary["environment"]
    machine = f"{environment['gpu']}, " + ", ".join(
        f"{name} {environment[name]}" for name in ("torch", "triton", "tilelang") if environment.get(name)
    )
    return "\n\n".join([_runs(summary["runs"]), machine + ".", _faults(summary), _gain(summary)])


def _runs(runs: dict[str, Any]) -> str:
    lines = [
        report.line(
            ["Run", "vLLM", "Code", "Held against", "Mean NLL", "RMS", "p99", "Decode RMS", "All well"]
        ),
        report.line(["---"] * 4 + ["---:"] * 4 + ["---"]),
    ]
    for name, run in runs.items():
        own = [one for one in run["findings"] if one[KIND] in ("against", "chunks")]
        steady = [one for one in own if one[LENGTH] >= STEADY]
        decoded = [one for one in run["findings"] if one[KIND] == "decode"]
        cells = [
            f"`{name}`",
            run["version"],
            _code(run),
            f"`{run['against']}`" if run["against"] else "itself",
        ]
        cells += [
            _worst(steady, MEAN, "{:.1e}"),
            _worst(steady, RMS),
            _worst(steady, P99),
            _worst(decoded, RMS),
        ]
        lines.append(report.line([*cells, _ended(run)]))
    return "\n".join(lines)


def _ended(run: dict[str, Any]) -> str:
    if not run["ok"]:
        return f"no: {_short(run['reasons'][0])}"
    return "refused by vLLM, as known" if run["refused"] else "yes"


def _code(run: dict[str, Any]) -> str:
    if run["arch"] is None:
        return "stock, native"
    return f"{run['arch']}, enable group" if run["off"] else run["arch"]


def _worst(findings: list[list[Any]], place: int, form: str = "{:.3f}") -> str:
    values = [one[place] for one in findings if one[place] is not None]
    return form.format(max(values)) if values else "-"


def _short(reason: str) -> str:
    return reason.split(" (/")[0].split(", please")[0].replace("|", "/")


def _faults(summary: dict[str, Any]) -> str:
    lines = [
        report.line(["Planted fault", "Found", "RMS", "Decode RMS"]),
        report.line(["---", "---", "---:", "---:"]),
    ]
    for name, fault in summary["runs"]["faults"]["faults"].items():
        against = [one for one in fault["findings"] if one[KIND] == "against" and one[LENGTH] >= STEADY]
        decoded = [one for one in fault["findings"] if one[KIND] == "decode"]
        found = ("none, rightly" if fault["found"] else "NO") if name == "prompts" else _yes(fault["found"])
        label = "none" if name == "prompts" else name
        lines.append(report.line([label, found, _worst(against, RMS), _worst(decoded, RMS)]))
    return "\n".join(lines)


def _spread(one: dict[str, float]) -> str:
    if "min" not in one:
        return f"{one['median']:,.2f}"
    return f"{one['median']:,.1f} ({one['min']:,.1f}-{one['max']:,.1f})"


def _yes(found: bool) -> str:
    return "yes" if found else "NO"


def _gain(summary: dict[str, Any]) -> str:
    gain = summary["accelerate_against_enable"]
    names = {
        "prefill_ms": "a prompt of 32,768 tokens, ms",
        "prefill_gpu_ms": "the same, GPU busy",
        "decode_1_ms": "a decode step of 1 request, ms",
        "decode_1_gpu_ms": "the same, GPU busy",
        "decode_8_ms": "a decode step of 8 requests, ms",
        "decode_8_gpu_ms": "the same, GPU busy",
    }
    lines = [
        report.line(["sm80 code, eight layers", "All ops", "Enable group alone", "Ratio"]),
        report.line(["---"] + ["---:"] * 3),
    ]
    times = [summary["runs"][f"timed-{which}"]["times"] for which in ("accelerate", "enable")]
    for key, label in names.items():
        fast, slow = (one[key] for one in times)
        ratio = f"{slow['median'] / fast['median']:.2f}x"
        apart = "min" not in fast or fast["max"] < slow["min"] or slow["max"] < fast["min"]
        lines.append(
            report.line([label, _spread(fast), _spread(slow), ratio if apart else f"{ratio} (overlap)"])
        )
    fast, slow = gain["kv_blocks"]
    lines.append(report.line(["KV cache blocks that vLLM reports", f"{fast:,}", f"{slow:,}", ""]))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Rewrites, or checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the tables are current")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(argv)
    content = tables(json.loads(options.summary.read_text(encoding="utf-8")))
    old = options.page.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise SystemExit(f"{options.page} has no {BEGIN} ... {END}")
    new = report.rewritten(old, (BEGIN, END), content)
    if new == old:
        return 0
    if options.check:
        print(f"{options.page} is not current: run benchmarks/generate_e2e.py", file=sys.stderr)
        return 1
    options.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
