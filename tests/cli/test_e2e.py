"""`deepinfer verify --e2e` on machines where it can run (a stand-in engine) and where it cannot."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_cli.commands import e2e
from deepinfer_cli.detect.target import Target, TargetKind
from deepinfer_cli.errors import UnsupportedError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay import payload
from deepinfer_cli.validate.e2e import plan
from tests.validate.e2e import site

H200 = {"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 140 * 10**9, "count": 1}
A100 = {"name": "NVIDIA A100", "capability": [8, 0], "memory_bytes": 80 * 10**9, "count": 1}
PHASES = (
    {"name": "prompts", "do": "generate", "lengths": [7, 130], "tokens": 4},
    {"name": "chunks of 700", "do": "score", "of": "prompts", "chunk": 700},
)


@pytest.fixture
def options(tmp_path, monkeypatch):
    """A stand-in vLLM with the overlay's folder in it; one small configuration, one for two GPUs."""
    pytest.importorskip("torch")
    root = site.make(tmp_path / "site") / "vllm"
    shutil.copytree(payload.bundled().root, root / payload.PACKAGE)
    small = plan.Configuration("small", phases=PHASES)
    two = replace(small, gpus=2)
    monkeypatch.setattr(plan, "CONFIGURATIONS", {"small": small, "two": two})
    monkeypatch.setattr(plan, "DEFAULT", ("small",))
    monkeypatch.setattr(e2e.plan, "DEFAULT", ("small",))
    target = Target(TargetKind.TREE, root, "0.0.fake", "deepseek_v41")
    return e2e.E2eOptions(target, Path(sys.executable), timeout_s=120.0)


@pytest.fixture
def sees(monkeypatch):
    """Makes the interpreter's probe answer."""

    def say(**found):
        monkeypatch.setattr(e2e.runner, "probe", lambda python, path: found)

    say(torch="1", triton="1", gpu=H200)
    return say


def run(options, capsys):
    result = e2e.run(options, Output(quiet=False))
    captured = capsys.readouterr()
    return result, captured.out + captured.err


def test_sm80_code_against_stock(options, sees, capsys):
    result, shown = run(replace(options, arch="sm80", full=True), capsys)
    assert result.exit_code == 0, shown
    assert [one["name"] for one in result.data["runs"]] == ["small-overlay", "small-stock"]
    assert result.data["not_run"] == [{"configuration": "two", "reason": "it takes 2 GPUs"}]
    assert "e2e: small-overlay: prompts" in shown
    assert "end to end: " in shown and ", 0 failed in" in shown
    json.dumps(result.data)


@pytest.mark.parametrize(("version", "runs"), [("0.32.0", False), ("0.33.0", True)])
def test_a_pipeline_is_not_run_where_vllm_refuses_it(options, sees, capsys, monkeypatch, version, runs):
    sees(torch="1", triton="1", gpu={**H200, "count": 2})
    staged = replace(plan.CONFIGURATIONS["two"], engine={"pipeline_parallel_size": 2})
    monkeypatch.setattr(plan, "CONFIGURATIONS", {"small": plan.CONFIGURATIONS["small"], "two": staged})
    target = replace(options.target, version=version)
    result, shown = run(replace(options, arch="sm80", full=True, target=target), capsys)
    assert result.exit_code == 0, shown
    assert ("two-overlay" in [one["name"] for one in result.data["runs"]]) is runs
    assert [one["configuration"] for one in result.data["not_run"]] == ([] if runs else ["two"])
    assert ("routing requires input_ids" in shown) is not runs


def test_an_ampere_card_compares_with_the_enable_group(options, sees, capsys):
    sees(torch="1", triton="1", gpu=A100)
    result, shown = run(options, capsys)
    assert result.exit_code == 0, shown
    tested, other = result.data["runs"]
    assert (tested["generated"], tested["off"]) == (False, [])
    assert other["name"] == "small-enable-only" and "combine" in other["off"]


@pytest.mark.parametrize("fault", ["decode", "chunk"])
def test_a_fault_fails_and_keeps_the_logs(options, sees, capsys, monkeypatch, fault):
    monkeypatch.setenv("FAKE_FAULT", fault)
    result, shown = run(replace(options, arch="sm80"), capsys)
    assert result.exit_code == 1
    (error,) = result.errors
    assert error.code == "verify-failed"
    assert "FAILED small-overlay: " in shown
    folder = Path(next(line for line in shown.splitlines() if "logs are in" in line).rsplit(" ", 1)[-1])
    assert (folder / "small-overlay" / "child.log").is_file()
    shutil.rmtree(folder)


def test_an_engine_that_does_not_start_is_named(options, sees, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_FAULT", "start")
    result, shown = run(replace(options, arch="sm80"), capsys)
    assert result.exit_code == 1
    assert "type fp8e4nv not supported in this architecture" in shown
    assert "  | " in shown  # the end of the log
    assert len(result.data["runs"]) == 1  # nothing to compare with, nothing started for it


@pytest.mark.parametrize(
    ("found", "arch", "words"),
    [
        ({"torch": "1", "triton": "1", "gpu": H200}, None, "stock vLLM is the better path"),
        ({"torch": "1", "triton": "1", "gpu": A100}, "sm86", "runs its own code"),
        ({"torch": "1", "triton": "1", "gpu": None}, None, "no CUDA GPU"),
        ({"torch": "1", "triton": "1", "gpu": {"problem": "old driver"}}, None, "old driver"),
        ({"torch": None, "triton": None}, None, "has no torch"),
        ({"problem": "no such file"}, None, "cannot be asked"),
    ],
)
def test_where_nothing_can_run(options, sees, found, arch, words):
    sees(**found)
    with pytest.raises(UnsupportedError, match=words) as caught:
        e2e.run(replace(options, arch=arch), Output())
    assert caught.value.code == "nothing-runnable" and caught.value.hint


def test_a_vllm_without_the_overlay(options, sees):
    shutil.rmtree(options.target.root / payload.PACKAGE)
    with pytest.raises(UnsupportedError, match="not installed"):
        e2e.run(options, Output())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--full"], "--full goes with --e2e"),
        (["--e2e", "gather"], "OPS does not go with --e2e"),
        (["--e2e", "--level", "static"], "--level does not go with --e2e"),
        (["--e2e", "--case", "x"], "--case does not go with --e2e"),
        (["--e2e", "--max-smem", "1"], "--max-smem does not go with --e2e"),
    ],
)
def test_what_does_not_go_together(cli, words, said):
    result = cli("verify", *words)
    assert result.code == 2
    assert said in result.err
