"""Rows, their figures and ratios; the table and the chart that are made of them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from deepinfer_cli.commands import serving_table
from deepinfer_cli.validate.serving import bench, plan, rows, score

ROOT = Path(__file__).parents[2]
PREFILL = plan.Workload(plan.PREFILL, 1_000, 1, 1)
DECODE = plan.Workload(plan.DECODE, 100, 11, 2)


def outcome(workload=PREFILL, before=0.0, after=0.0, **result):
    given = {
        "ttfts": [0.5],
        "itls": [[]],
        "input_lens": [1_000],
        "output_lens": [1],
        "errors": [],
        "failed": 0,
    }
    event = {
        "event": "run", "before": {rows.HITS: before}, "after": {rows.HITS: after}, "result": given | result,
    }  # fmt: skip
    one = plan.Bench("x", plan.Side("overlay"), workload, 0, 7)
    return bench.Outcome(one, event, bench.reason_of(event), 1.5)


def row(workload, provider, *values, metric="prefill_tokens_per_s", **case):
    runs = [
        {"repeat": n, "seed": n, "status": "PASSED", "reason": "", "metrics": {metric: value}}
        for n, value in enumerate(values)
    ]  # fmt: skip
    work = plan.Workload(workload, case.get("input_tokens"), 1, case.get("streams", 1))
    made = rows.row(workload, work.case, provider, runs, "sm80")
    off = ["combine"] if provider == plan.ENABLE_ONLY else []
    made["overlay"] = {provider: {"state": "live", "bound": ["gather"], "off": off}}
    return made


def test_prefill_is_tokens_over_the_time_to_the_first():
    found = rows.of_run(PREFILL, outcome())
    assert found["metrics"] == {"prefill_tokens_per_s": 2_000.0, "ttft_s": 0.5}
    assert (found["status"], found["cached_tokens"], found["seed"]) == ("PASSED", 0, 7)


def test_decode_adds_the_streams_up_without_their_prefill():
    # ten tokens after the first in one second, and in two
    done = outcome(
        DECODE, ttfts=[9.0, 9.0], itls=[[0.1] * 10, [0.5] * 4], input_lens=[100, 100], output_lens=[11, 11],
        output_throughput=2.0, spec_decode_acceptance_length=2.5,
    )  # fmt: skip
    found = rows.of_run(DECODE, done)["metrics"]
    assert found["decode_tokens_per_s"] == pytest.approx(15.0)
    assert found["tpot_ms"] == pytest.approx(150.0)
    assert (found["output_tokens_per_s"], found["acceptance_length"]) == (2.0, 2.5)
    assert "acceptance_rate" not in found


def test_what_is_no_measurement():
    warm = rows.of_run(PREFILL, outcome(before=10.0, after=74.0))
    assert warm["status"] == "FAILED" and "64 tokens" in warm["reason"]
    # a decode run may find its prompt in the cache
    cached = outcome(DECODE, after=64.0, itls=[[0.1]], output_lens=[2])
    assert rows.of_run(DECODE, cached)["status"] == "PASSED"
    failed = rows.of_run(PREFILL, outcome(errors=["Traceback\nValueError: too long"], failed=1))
    assert failed["status"] == "RUNTIME_ERROR" and "ValueError: too long" in failed["reason"]
    assert rows.of_run(PREFILL, outcome(ttfts=[0.0]))["reason"] == "no request was answered"


def test_ratios_are_better_above_one_either_way():
    fast, slow = row("prefill", "overlay", 4.0, 5.0, 6.0), row("prefill", "enable-only", 2.0, 2.5, 4.5)
    assert rows.ratio([fast, slow], fast, "prefill_tokens_per_s") == 2.0
    assert rows.apart([fast, slow], fast, "prefill_tokens_per_s") is False
    assert serving_table.ratio_text([fast, slow], fast, "prefill_tokens_per_s") == "2.000x (overlap)"
    quick, late = (row("prefill", name, *values, metric="ttft_s") for name, values in
                   (("overlay", (1.0, 1.1)), ("enable-only", (2.0, 2.2))))  # fmt: skip
    assert rows.ratio([quick, late], quick, "ttft_s") == pytest.approx(2.0)
    assert rows.apart([quick, late], quick, "ttft_s") is True
    once = [row("prefill", name, value) for name, value in (("overlay", 4.0), ("enable-only", 2.0))]
    assert serving_table.ratio_text(once, once[0], "prefill_tokens_per_s") == "2.000x (one run)"
    other = row("prefill", "enable-only", 2.0, input_tokens=9)
    assert rows.ratio([fast, other], fast, "prefill_tokens_per_s") is None


def test_a_row_with_a_failed_run_says_so():
    runs = [{"status": "PASSED", "reason": "", "metrics": {"ttft_s": 1.0}}, {"status": "FAILED", "reason": "warm", "metrics": {}}]  # fmt: skip
    made = rows.row("prefill", {}, "overlay", runs, "sm80")
    assert (made["status"], made["reason"], made["metrics"]["ttft_s"]["p50"]) == ("FAILED", "warm", 1.0)


def test_scores_against_each_other():
    assert score.apart([1.0, 2.0], [1.5, 1.5]) == {"mean": 0.0, "rms": 0.5, "largest": 0.5}
    found = rows.score_rows(
        {"overlay": [[1.0, 2.0]] * 2, "enable-only": [[1.1, 2.1]] * 2}, {"tokens": 2}, "sm80"
    )
    by = {(one["workload"], one["provider"]): one["metrics"] for one in found}
    assert by["nll", "overlay"]["nll"]["p50"] == 1.5
    assert by["nll-difference", "overlay against itself"]["rms"]["max"] == 0.0
    assert by["nll-difference", "overlay against enable-only"]["mean"]["p50"] == pytest.approx(-0.1)


def test_log_probabilities_that_are_none():
    with pytest.raises(ValueError, match="0 log-probabilities"):
        score._of_prompt({"prompt_logprobs": None}, [1, 2])
    with pytest.raises(ValueError, match="-9999"):
        score._of_prompt({"prompt_logprobs": [None, {"2": {"logprob": -9999.0}}]}, [1, 2])
    assert score._of_prompt({"prompt_logprobs": [None, {"2": {"logprob": -1.5}}]}, [1, 2]) == [1.5]


@pytest.fixture
def measured():
    """A result with both servers' rows."""
    made = [
        row("prefill", "overlay", 4_000.0, 4_100.0, input_tokens=16_384),
        row("prefill", "enable-only", 3_000.0, 3_100.0, input_tokens=16_384),
        row("decode", "overlay", 200.0, 210.0, metric="decode_tokens_per_s", streams=4),
        row("decode", "enable-only", 190.0, 205.0, metric="decode_tokens_per_s", streams=4),
    ]  # fmt: skip
    scored = rows.score_rows(
        {"overlay": [[1.0, 2.0]] * 2, "enable-only": [[1.1, 2.1]] * 2}, {"tokens": 2}, "sm80"
    )
    for one in scored:
        one["overlay"] = {"overlay": {"state": "live", "bound": [], "off": []}}
    environment = {
        "gpu": "NVIDIA H200", "driver": "1", "cuda": "13.0", "torch": "2", "vllm": "0.33.0", "date": "2026-11-30T09",
    }  # fmt: skip
    serving = {"order": "together", "rounds": 1, "runs": 2, "model": "small random V4.1", "servers": []}
    return {"schema_version": 1, "environment": environment, "serving": serving, "rows": made + scored}


@pytest.fixture
def generator(monkeypatch):
    """benchmarks/generate_serving.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return importlib.import_module("generate_serving")


def test_the_documents_tables_are_current(generator):
    assert generator.main(["--check"]) == 0


def test_the_documents_table(generator, measured):
    text = generator.content(measured)
    lines = [line for line in text.splitlines() if line.startswith("| cold") or line.startswith("| decode")]
    assert "1.328x" in lines[0] and "3,349.4 → 4,037.0 (1.21x)" in lines[0] and "live / live" in lines[0]
    assert "(overlap)" in lines[1] and "163.8 → 170.5 (1.04x)" in lines[1]
    assert "differ by 1.00e-01 rms; runs of one server differ by at most 0.00e+00" in text
    assert "six GA100 64 GB" in text and "Published by others" in text


def test_published_figures_of_no_row_are_named(generator, measured):
    last = generator.content(measured).splitlines()[-1]
    assert "input tokens 65,536, `ttft_s`: 13.2 → 10.7 (1.23x)" in last and "3,349.4" not in last


def test_the_chart(generator, measured, tmp_path):
    pytest.importorskip("matplotlib")
    paths = generator.draw(measured, tmp_path)
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG") and "16,384" in paths[1].read_text()


def test_what_the_readme_says_of_the_second_run():
    second = json.loads((ROOT / "benchmarks/results/serving/serving_second_run.json").read_text("utf-8"))
    ratios = []
    for mine in (row for row in second["rows"] if row["workload"] == "prefill"):
        both = [row for row in second["rows"] if row["case"] == mine["case"] and row["workload"] == "prefill"]
        rates = {row["provider"]: row["metrics"]["prefill_tokens_per_s"]["p50"] for row in both}
        if mine["provider"] == "overlay":
            ratios.append(f"{rates['overlay'] / rates['enable-only']:.2f}x")
    assert f"has {' and '.join(ratios)} for the two prompts" in (ROOT / "README.md").read_text("utf-8")
