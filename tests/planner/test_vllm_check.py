"""The question to an installed vLLM's planner, and what is made of its answers; a real vLLM is asked on a machine with one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from deepinfer_cli.detect.target import Target, TargetKind
from deepinfer_cli.planner import vllm_check
from deepinfer_cli.serve import memory
from deepinfer_cli.serve.memory import Layout, Load

# a folder with an importable vLLM, for a machine that has one: its own planner is asked then
SITE = os.environ.get("PLANNER_TEST_SITE")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`ask(python code)`: the answer where the child is that code."""

    def run(code: str, timeout_s: float = 60.0):
        child = tmp_path / "child.py"
        child.write_text(code)
        monkeypatch.setattr(vllm_check, "CHILD", child)
        (tmp_path / "vllm").mkdir(exist_ok=True)
        target = Target(TargetKind.ENVIRONMENT, tmp_path / "vllm", "0.33.0", python=Path(sys.executable))
        return vllm_check.ask(target, memory.estimate(Layout(8), 80, Load()), Load(), timeout_s)

    return run


def answer(**changed: object) -> str:
    pool = memory.estimate(Layout(8), 80, Load()).pool
    found = {"blocks": pool.blocks, "tokens": pool.tokens, "concurrency": pool.concurrency} | changed
    return f"print('a warning of vLLM'); print({json.dumps(json.dumps(found))})"


def test_agreement_and_difference(ask) -> None:
    assert ask(answer())["agrees"] is True
    assert ask(answer(blocks=1))["agrees"] is False
    assert ask(answer(tokens=1))["agrees"] is False


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('no torch')", "no torch"),
        ("pass", "exit code 0"),
        ("print(3)", "exit code 0"),
        ('print(\'{"error": "ImportError: vllm"}\')', "ImportError: vllm"),
        ("import time; time.sleep(30)", "timed out"),
    ],
)
def test_a_vllm_that_does_not_answer_is_no_failure(ask, code: str, words: str) -> None:
    assert words in ask(code, 2.0)["error"]


def test_the_question_has_every_layer_once_and_the_drafter_on_the_last_stage() -> None:
    load = Load()
    asked = vllm_check.request(memory.estimate(Layout(4, (20, 20)), 80, load), load)
    assert [layer for stage in asked["stages"] for layer in stage] == list(range(43))
    assert (len(asked["available"]), asked["ring_rows"], asked["traffic"]["context"]) == (2, 8, 1_048_576)
    assert all(size > 0 for size in asked["available"])


@pytest.mark.skipif(not SITE, reason="NOT TESTED: no importable vLLM was named (PLANNER_TEST_SITE)")
@pytest.mark.parametrize("layout", [Layout(8), Layout(4, (20, 20)), Layout(2, (14, 6, 20))])
def test_a_real_vllm_agrees(layout: Layout) -> None:
    target = Target(TargetKind.TREE, Path(str(SITE)) / "vllm", python=Path(sys.executable))
    load = Load(speculative=5 if layout.pp == 1 else 0)
    found = vllm_check.ask(target, memory.estimate(layout, 200, load), load)
    assert found.get("agrees"), found
