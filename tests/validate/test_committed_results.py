"""The result files in `benchmarks/results/`: their form, and that the kernels are as fast as they were meant to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.validate import results
from tests.validate.test_results import result, row

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
SUMMARY = FOLDER / "sm80_benchmark_summary.json"
FILES = sorted(FOLDER.glob("*.json"))
NONE_YET = "NOT TESTED: no measurement is committed"

ENVIRONMENT = {"gpu", "driver", "cuda", "torch", "triton", "tilelang", "vllm", "commit", "date"}
STATUSES = {"PASSED", "FAILED", "COMPILE_ERROR", "RUNTIME_ERROR", "TIMEOUT", "SKIPPED"}
ROW = {
    "op": str,
    "case": dict,
    "provider": ("overlay", "stock", "stock-0.30-grid", "torch"),
    "codegen": ("sm80", "sm86", "sm89", "native"),
    "timing": ("graph", "events"),
    "bytes": (int, type(None)),
    "flops": (int, type(None)),
    "ceiling_fraction": (float, int, type(None)),
    "status": tuple(STATUSES),
}
# op, tokens, baseline, least speed-up of sm80 code over it
SPEEDUPS = (
    ("gather", 16384, "stock-0.30-grid", 4.02),
    ("gather", 49152, "stock-0.30-grid", 7.64),
    ("gather", 16384, "stock", 3.0),
    ("gather", 49152, "stock", 3.0),
    ("combine", 1536, "torch", 22.17),
    ("combine", 96, "stock", 1.0),
    ("combine", 384, "stock", 1.0),
    ("combine", 1536, "stock", 1.0),
    ("combine", 6144, "stock", 1.0),
)


def faults(document: dict[str, Any]) -> list[str]:
    """What is not as the format says."""
    found = [f"no {name} in environment" for name in ENVIRONMENT - document["environment"].keys()]
    for number, one in enumerate(document["rows"]):
        for name, wanted in ROW.items():
            value = one.get(name, "missing")
            values = isinstance(wanted, tuple) and isinstance(wanted[0], str)
            if not (value in wanted if values else isinstance(value, wanted)):
                found.append(f"row {number}: {name} is {value!r}")
        if (one["status"] == "PASSED") != (set(one["latency_us"] or ()) == {"p20", "p50", "p80"}):
            found.append(f"row {number}: {one['status']} with latency {one['latency_us']}")
    keys = [results.key(one) for one in document["rows"]]
    return found + ([] if len(set(keys)) == len(keys) else ["a row is there twice"])


def ours(document: dict[str, Any], op: str, tokens: int, timing: str = "graph") -> dict[str, Any]:
    """The overlay's row in sm80 code."""
    key = (op, tokens, "overlay", "sm80", timing)
    names = ("op", "tokens", "provider", "codegen", "timing")
    (found,) = [
        one for one in document["rows"] if tuple({**one, **one["case"]}.get(name) for name in names) == key
    ]
    return found


def speedup(document: dict[str, Any], op: str, tokens: int, baseline: str) -> float:
    """Over a baseline, in its timing."""
    mine = ours(document, op, tokens, "events" if baseline == "torch" else "graph")
    ratio = results.speedup(document["rows"], mine, baseline)
    assert ratio is not None, f"{op} {tokens} was not measured against {baseline}"
    return ratio


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_committed_file_has_the_documented_form(path: Path) -> None:
    assert faults(results.read(path)) == []


@pytest.mark.skipif(not SUMMARY.exists(), reason=NONE_YET)
@pytest.mark.parametrize(("op", "tokens", "baseline", "least"), SPEEDUPS)
def test_the_measured_speedups(op: str, tokens: int, baseline: str, least: float) -> None:
    assert speedup(results.read(SUMMARY), op, tokens, baseline) >= least


@pytest.mark.skipif(not SUMMARY.exists(), reason=NONE_YET)
def test_gather_uses_the_bandwidth() -> None:
    assert ours(results.read(SUMMARY), "gather", 49152)["ceiling_fraction"] >= 0.7


@pytest.mark.skipif(not SUMMARY.exists(), reason=NONE_YET)
def test_every_overlay_row_is_green() -> None:
    rows = results.read(SUMMARY)["rows"]
    assert [one for one in rows if one["provider"] == "overlay" and one["status"] != "PASSED"] == []


def test_what_is_malformed_or_too_slow_is_seen() -> None:
    good = result(
        row(p50=20.0), row(provider="stock", p50=61.0, codegen="native"), tilelang=None, commit="c", date="d"
    )
    assert faults(good) == []
    assert speedup(good, "gather", 49152, "stock") == pytest.approx(3.05)
    bad = result(
        row(provider="other"),
        row(status="PASSED", p50=None),
        row(timing="wall"),
        row(timing="wall"),
        date="d",
    )
    assert set(faults(bad)) == {
        "no commit in environment",
        "no tilelang in environment",
        "row 0: provider is 'other'",
        "row 1: PASSED with latency None",
        "row 2: timing is 'wall'",
        "row 3: timing is 'wall'",
        "a row is there twice",
    }
    with pytest.raises(AssertionError, match="not measured against torch"):
        speedup(result(row(timing="events")), "gather", 49152, "torch")


@pytest.mark.parametrize("name", ["verify", "live_0.33.0", "live_0.30.0"])
def test_the_checks_are_of_the_measured_payload(name: str) -> None:
    summary = results.read(SUMMARY)["environment"]["commit"]
    document = json.loads((FOLDER / "checks" / f"{name}.json").read_text(encoding="utf-8"))
    if name == "verify":
        digest, good = document["data"]["payload"]["digest"], document["status"] == "success"
        assert {one["level"] for one in document["data"]["results"]} == {"compile", "numerics"}
    else:
        digest, good = document["checks"]["bound"]["report"]["payload_digest"], document["ok"]
    assert good
    assert f"payload {digest[:12]}" in summary
