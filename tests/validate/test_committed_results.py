"""The result files in `benchmarks/results/`: their form, and that the kernels are as fast as they were meant to be."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.detect.gpu import SERVED
from deepinfer_cli.overlay import manifest, payload
from deepinfer_cli.overlay.closure import op_digest
from deepinfer_cli.validate import results
from deepinfer_cli.validate.baselines import NAMES
from tests.validate.test_results import result, row

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
SUMMARY = FOLDER / "sm80_benchmark_summary.json"
FILES = sorted(FOLDER.glob("*.json"))

ENVIRONMENT = {"gpu", "driver", "cuda", "torch", "triton", "tilelang", "vllm", "commit", "date"}
STATUSES = {"PASSED", "FAILED", "COMPILE_ERROR", "RUNTIME_ERROR", "TIMEOUT", "SKIPPED"}
ROW = {
    "op": str,
    "case": dict,
    "provider": NAMES,
    "codegen": ("sm80", "sm86", "sm89", "native"),
    "timing": ("graph", "events"),
    "bytes": (int, type(None)),
    "flops": (int, type(None)),
    "ceiling_fraction": (float, int, type(None)),
    "status": tuple(STATUSES),
}
OPS = {
    "gather", "combine", "ragged", "sparse_decode", "sparse_prefill", "mhc_post", "mhc_post_with_sqrsum",
    "mhc_pre_delayed", "mhc_fused_post_pre_delayed", "kv_insert", "indexer_k", "indexer_q", "indexer_prefill",
    "indexer_decode", "engram",
}  # fmt: skip
MHC_TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 33, 48, 64, 128, 256, 1024, 2048, 8192)
SMALL = 49_152
# `verify --suite full`, of the accelerate group and of what was added to it
VERIFIED = ("verify", "verify_enable")
# mHC, "nowhere slower": calls of a few microseconds differ by as much from run to run
NOT_SLOWER = 0.97


@dataclass(frozen=True)
class Bar:
    """The least speed-up over a baseline that a row of the overlay must show.

    Attributes:
        code: of the overlay.
        case: params that tell the row; `max_smem` and `layout` are None unless named.
        missed: why the value that was asked for is not reached; empty where it is. Reaching it makes the test fail, so
            that this is taken away.
    """

    op: str
    tokens: int
    baseline: str
    least: float
    code: str = "sm80"
    case: dict[str, Any] = field(default_factory=dict)
    missed: str = ""

    def __str__(self) -> str:
        words = [
            self.op,
            self.code,
            self.tokens,
            *(f"{name}={value}" for name, value in self.case.items()),
            self.baseline,
        ]
        return "-".join(map(str, words))


T12 = (
    "7.9 us against 11.5; 4.0 were needed, and the steps that depend on each other take longer on this card: "
    "benchmarks/results/checks/mhc_latency_floor.txt"
)
# what the issues ask for
ASKED = (
    Bar("gather", 16384, "stock-0.30-grid", 4.02),
    Bar("gather", 49152, "stock-0.30-grid", 7.64),
    Bar("gather", 16384, "stock", 3.0),
    Bar("gather", 49152, "stock", 3.0),
    Bar("combine", 1536, "torch", 22.17),
    *(Bar("combine", tokens, "stock", 1.0) for tokens in (96, 384, 1536, 6144)),
    *(
        Bar("sparse_decode", tokens, "stock", least, case={"heads": heads})
        for heads in (64, 32)
        for tokens, least in ((1, 7.0), (6, 7.0), (24, 3.0), (96, 3.0))
    ),
    *(
        Bar("sparse_prefill", tokens, "stock", least, code, {"heads": heads})
        for code, least in (("sm80", 2.5), ("sm86", 1.8))
        for heads in (64, 32)
        for tokens in (512, 2048)
    ),
    *(
        Bar("sparse_prefill", tokens, "stock", 1.0, case={"heads": heads, "max_smem": SMALL})
        for heads in (64, 32)
        for tokens in (512, 2048)
    ),
    Bar("mhc_fused_post_pre_delayed", 6, "stock", 1.30),
    Bar("mhc_fused_post_pre_delayed", 12, "stock", 2.89, missed=T12),
    Bar("mhc_pre_delayed", 2048, "stock", 3.0),
    *(
        Bar(op, tokens, "stock", NOT_SLOWER)
        for op in ("mhc_post", "mhc_pre_delayed", "mhc_fused_post_pre_delayed")
        for tokens in MHC_TOKENS
    ),
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
        if one.get("arch") not in (None, *SERVED.values()) or one.get("ceiling", "copy") not in (
            "copy",
            "mma",
        ):
            found.append(f"row {number}: arch is {one.get('arch')!r}, ceiling {one.get('ceiling')!r}")
        if not isinstance(one.get("roof"), float | int | None):
            found.append(f"row {number}: roof is {one['roof']!r}")
        if (one["status"] == "PASSED") != (set(one["latency_us"] or ()) == {"p20", "p50", "p80"}):
            found.append(f"row {number}: {one['status']} with latency {one['latency_us']}")
    keys = [results.key(one) for one in document["rows"]]
    return found + ([] if len(set(keys)) == len(keys) else ["a row is there twice"])


def ours(document: dict[str, Any], bar: Bar) -> dict[str, Any]:
    """The overlay's one row that a bar is about."""
    wanted = {"tokens": bar.tokens, "max_smem": None, "layout": None, **bar.case}
    timing = "events" if bar.baseline == "torch" else "graph"
    key = (bar.op, "overlay", bar.code, timing)
    found = [
        one
        for one in document["rows"]
        if (one["op"], one["provider"], one["codegen"], one["timing"]) == key
        and all(one["case"].get(name) == value for name, value in wanted.items())
    ]
    assert len(found) == 1, f"{bar}: {len(found)} rows of it in the summary: measure again"
    return found[0]


def speedup(document: dict[str, Any], bar: Bar) -> float:
    """Over the bar's baseline, in its timing."""
    ratio = results.speedup(document["rows"], ours(document, bar), bar.baseline)
    if ratio is None:
        raise NotMeasured(f"{bar} was not measured")
    return ratio


def marked(bar: Bar) -> Any:
    """`bar` as a test's parameter; one that is not reached must not be."""
    marks = pytest.mark.xfail(reason=bar.missed, strict=True, raises=Slower) if bar.missed else ()
    return pytest.param(bar, id=str(bar), marks=marks)


class NotMeasured(AssertionError):
    """The summary has no time of the baseline."""


class Slower(AssertionError):
    """A speed-up below its bar; what was not measured at all is another error."""


def judge(document: dict[str, Any], bar: Bar) -> None:
    """Raises `Slower` where the bar is not reached."""
    found = speedup(document, bar)
    if found < bar.least:
        raise Slower(f"{bar}: {found:.2f}x, asked were {bar.least}x")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_committed_file_has_the_documented_form(path: Path) -> None:
    assert faults(results.read(path)) == []


@pytest.mark.parametrize("bar", [marked(bar) for bar in ASKED])
def test_the_measured_speedups(bar: Bar) -> None:
    judge(results.read(SUMMARY), bar)


def test_gather_uses_the_bandwidth() -> None:
    assert ours(results.read(SUMMARY), Bar("gather", 49152, "stock", 0.0))["ceiling_fraction"] >= 0.7


def other_kernels(document: dict[str, Any]) -> list[str]:
    """The ops whose rows are not of the kernels that are here.

    Raises:
        NotRecorded: the file does not say which kernels it measured.
    """
    found = document["environment"].get(results.KERNELS)
    if found is None:
        raise NotRecorded
    here, measured = payload.bundled(), {row["op"] for row in document["rows"]}
    return sorted(op for op in measured | found.keys() if found.get(op) != op_digest(here, op))


class NotRecorded(AssertionError):
    """The file was written before results said which kernels they are of."""


def test_the_summary_is_of_these_kernels() -> None:
    stale = other_kernels(results.read(SUMMARY))
    assert stale == [], f"measure {', '.join(stale)} again (benchmarks/README.md)"


def test_only_ops_whose_kernels_changed_are_to_be_measured_again() -> None:
    here = payload.bundled()
    kernels = {op: op_digest(here, op) for op in ("gather", "combine")}
    # the digest of the whole overlay does not matter
    good = result(row(), row("combine"), commit="payload 0123456789ab", kernels=kernels)
    assert other_kernels(good) == []
    assert other_kernels(result(row(), row("combine"), kernels=kernels | {"combine": "0" * 64})) == [
        "combine"
    ]
    assert other_kernels(result(row(), row("ragged"), kernels=kernels)) == ["ragged"]
    with pytest.raises(NotRecorded):
        other_kernels(result(row()))


def test_every_op_is_measured_and_the_ceilings_with_them() -> None:
    document = results.read(SUMMARY)
    measured = {one["op"] for one in document["rows"] if one["provider"] == "overlay" and one["latency_us"]}
    assert measured == OPS, f"the summary lacks {', '.join(sorted(OPS - measured))}: measure again"
    assert set(document["environment"]["mma_tflops"]) == {"sm80", "sm86"}
    prefill = [one for one in document["rows"] if one["op"] == "sparse_prefill"]
    assert {one["ceiling"] for one in prefill} == {"mma"}
    # the card's own code has no share of what Ampere code can do at most
    shares = {one["ceiling_fraction"] is None for one in prefill if one["codegen"] == "native"}
    assert shares == {True}


def test_every_overlay_row_is_green() -> None:
    rows = results.read(SUMMARY)["rows"]
    assert [one for one in rows if one["provider"] == "overlay" and one["status"] != "PASSED"] == []


def test_what_is_malformed_or_too_slow_is_seen() -> None:
    good = result(
        row(p50=20.0), row(provider="stock", p50=61.0, codegen="native"), tilelang=None, commit="c", date="d"
    )
    assert faults(good) == []
    assert speedup(good, Bar("gather", 49152, "stock", 3.0)) == pytest.approx(3.05)
    judge(good, Bar("gather", 49152, "stock", 3.0))
    with pytest.raises(Slower, match=r"3\.05x, asked were 4\.0x"):
        judge(good, Bar("gather", 49152, "stock", 4.0))
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
    with pytest.raises(AssertionError, match="gather-sm80-49152-torch was not measured"):
        speedup(result(row(timing="events")), Bar("gather", 49152, "torch", 1.0))
    limited = row(case={"tokens": 49152, "max_smem": SMALL})
    with pytest.raises(AssertionError, match="0 rows"):
        ours(result(limited), Bar("gather", 49152, "stock", 1.0))
    assert (
        ours(result(limited, row()), Bar("gather", 49152, "stock", 1.0, case={"max_smem": SMALL})) == limited
    )


def test_every_op_has_been_verified_on_a_gpu() -> None:
    """The compile gate needs none: it is a test of its own."""
    verified = [_check(name)["data"]["results"] for name in VERIFIED]
    assert {one["op"] for some in verified for one in some if one["level"] == "numerics"} == OPS


@pytest.mark.parametrize("name", [*VERIFIED, "live_0.33.0", "live_0.30.0"])
def test_the_checks_are_of_the_measured_payloads(name: str) -> None:
    summary, document = results.read(SUMMARY)["environment"]["commit"], _check(name)
    if name in VERIFIED:
        digest, good = document["data"]["payload"]["digest"], document["status"] == "success"
    else:
        digest, good = document["checks"]["bound"]["report"]["payload_digest"], document["ok"]
    assert good
    assert f"payload {digest[:12]}" in summary


def _check(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "checks" / f"{name}.json").read_text(encoding="utf-8"))
    return document


def test_every_kernel_of_the_end_to_end_runs_builds_for_sm80_and_sm86() -> None:
    runs = json.loads((FOLDER / "checks" / "recorded_2026-11-30.json").read_text(encoding="utf-8"))["runs"]
    assert runs.keys() == {"0.33.0", "0.32.0", "0.31.0", "0.30.0"}
    for run in runs.values():
        assert run["archs"] == ["sm80", "sm86"] and run["specializations"] > 50
        assert run["ok"] and not run["failed"]


def test_the_overlay_launched_nothing_that_the_compile_gate_does_not_build() -> None:
    runs = json.loads((FOLDER / "checks" / "recorded_2026-11-30.json").read_text(encoding="utf-8"))["runs"]
    names = {name for run in runs.values() for name in run["kernels"]}
    ours = {name.rpartition(".")[2] for name in names if name.startswith("vllm.deepinfer_sm80.")}
    pytest.importorskip("triton")
    built = set()
    for spec in manifest.load(payload.bundled().root / "manifest.toml").ops:
        if (payload.bundled().root / "ops" / spec.name / "triton.py").is_file():
            module = importlib.import_module(f"deepinfer_sm80.ops.{spec.name}.triton")
            built |= {
                variant.kernel.fn.__name__ for arch in SERVED.values() for variant in module.variants(arch)
            }
    assert len(ours) > 8 and ours <= built


def test_the_end_to_end_runs() -> None:
    """What is known not to run is named with what vLLM says, so that a release that mends it shows here."""
    document = json.loads((FOLDER / "checks" / "e2e_2026-11-30.json").read_text(encoding="utf-8"))
    assert document["ok"] and all(run["ok"] for run in document["runs"].values())
    refused = {name: run["refused"] for name, run in document["runs"].items() if run["refused"]}
    assert "Workers disagree on supported KV cache layouts" in refused.pop("pp2-two-layers")
    assert refused.keys() == {"pp2-0.32.0", "pp2-0.31.0", "pp2-0.30.0"}
    assert all("vision MoE routing requires input_ids" in words for words in refused.values())
    assert {"pp2-sm80", "pp2-graphs", "tp2-sm80", "sm80-draft", "sm80-long"} <= document["runs"].keys()
    faults = document["runs"]["faults"]["faults"]
    assert len(faults) == 7 and all(one["found"] for one in faults.values())
    gain = document["accelerate_against_enable"]
    assert gain["kv_blocks"][0] >= gain["kv_blocks"][1]
    assert gain["prefill_ms"]["ratio"] > 1.1 and gain["decode_1_gpu_ms"]["ratio"] > 1.0
    assert document["runs"]["native-off"]["bound"] == []
