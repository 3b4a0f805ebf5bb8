"""The child and its driver against a stand-in engine: everything but vLLM and the GPU is real."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from deepinfer_cli.validate.e2e import compare, drive, plan
from tests.validate.e2e import site

pytest.importorskip("torch")

SMALL = plan.Configuration(
    "small",
    phases=(
        {"name": "prompts", "do": "generate", "lengths": [7, 130], "tokens": 16},
        {"name": "chunks of 700", "do": "score", "of": "prompts", "chunk": 700},
        {"name": "served", "do": "generate", "lengths": [100], "tokens": 4, "seed": 2, "plain": True},
        {"name": "prefix", "do": "prefix", "shared": 200, "own": 60, "tokens": 8},
        {"name": "far", "do": "far", "length": 600, "tokens": 4},
        {"name": "times", "do": "time", "prefill": 50, "batches": [1, 2], "steps": 2, "context": 9},
    ),
)


@pytest.fixture
def vllm(tmp_path):
    """The stand-in's folder."""
    return site.make(tmp_path / "site")


def child(vllm: Path, folder: Path, fault: str = "", configuration=SMALL, **more):
    """One run's document."""
    configuration = replace(configuration, env={"FAKE_FAULT": fault} if fault else {})
    run = plan.Run(more.pop("name", "run"), configuration, parent=vllm, **more)
    return drive.run(run, Path(sys.executable), folder, 120.0)


def bad(document) -> list[str]:
    return [finding.kind for finding in compare.of_run(document) if not finding.ok]


def test_a_run_says_everything(vllm, tmp_path):
    document = child(vllm, tmp_path / "one", arch="sm80", generate=True)
    assert document["complete"], drive.why_failed(document)
    assert not document["errors"]
    assert document["answer"]["kv_blocks"] == 12
    assert document["kv_tokens"] == 12_345
    assert document["answer"]["workers"][0]["classes"] == ["vllm.Attention"]
    assert document["parameters"] == {"target-0": [["weight", [4, 8], "float32", "matrix"]]}
    assert [name for name, _ in document["steps"]][:2] == ["prepare", "engine"]
    assert len(document["phases"]["prompts"]["rows"][1]["nll"]) == 129
    assert len(document["phases"]["served"]["rows"][0]["nll"]) == 99
    assert set(document["phases"]["times"]) >= {"prefill_ms", "decode_1_ms", "decode_2_ms"}
    assert bad(document) == []
    json.dumps(document)


def test_two_runs_of_one_model_are_the_same(vllm, tmp_path):
    one, two = (child(vllm, tmp_path / name, name=name) for name in ("one", "two"))
    findings = compare.against(one, two)
    assert {finding.kind for finding in findings} == {"against"}
    assert all(finding.ok for finding in findings), findings
    assert {finding.phase for finding in findings} == {"prompts", "chunks of 700", "served", "far"}


@pytest.mark.parametrize(("fault", "kind"), [("decode", "decode"), ("chunk", "chunks"), ("cache", "prefix")])
def test_a_fault_is_found(vllm, tmp_path, fault, kind):
    document = child(vllm, tmp_path / "one", fault)
    assert document["complete"]
    assert kind in bad(document)


def test_an_engine_that_does_not_start_names_the_root_cause(vllm, tmp_path):
    document = child(vllm, tmp_path / "one", "start")
    assert not document["complete"]
    assert document["answer"] is None
    assert bad(document) == ["run"]
    said = drive.why_failed(document)
    assert said.startswith("engine: ValueError: type fp8e4nv not supported in this architecture (")
    assert "engine core failed" in document["errors"][0]["raised"]
    assert any("fp8e4nv" in line for line in document["tail"])


def test_a_phase_that_fails_leaves_the_others(vllm, tmp_path):
    document = child(vllm, tmp_path / "one", "phase")
    assert not document["complete"]
    assert {error["step"] for error in document["errors"]} == {"prompts", "chunks of 700"}
    assert {"served", "prefix", "far", "times"} <= document["phases"].keys()


def test_another_vllm_than_the_one_meant_is_refused(vllm, tmp_path, monkeypatch):
    run = plan.Run("run", SMALL, parent=tmp_path)
    environment = run.environment() | {"PYTHONPATH": str(vllm)}
    monkeypatch.setattr(plan.Run, "environment", lambda self: environment)
    document = drive.run(run, Path(sys.executable), tmp_path / "one", 60.0)
    assert "not the one in" in drive.why_failed(document)


def test_a_child_that_hangs_is_ended(vllm, tmp_path):
    waiting = replace(SMALL, phases=({**SMALL.phases[0], "after": str(tmp_path / "never")},))
    run = plan.Run("run", waiting, parent=vllm)
    document = drive.run(run, Path(sys.executable), tmp_path / "one", 3.0)
    assert not document["complete"]
    assert drive.why_failed(document).startswith("not done within 3 s")


def test_an_interpreter_that_is_none_is_said(vllm, tmp_path):
    with pytest.raises(OSError, match="no-python"):
        drive.run(plan.Run("run", SMALL, parent=vllm), tmp_path / "no-python", tmp_path / "one", 5.0)


def test_a_planted_fault_is_undone(vllm, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "def prepare(request):\n    pass\n\n"
        "def plant(name, engine):\n"
        "    weight = engine.weight.data.clone()\n"
        "    engine.weight.data.add_(1.0)\n"
        "    return lambda: engine.weight.data.copy_(weight)\n"
    )
    first = SMALL.phases[0]
    phases = (first, {**first, "name": "wrong", "plant": "x"}, {**first, "name": "right"})
    document = child(vllm, tmp_path / "one", configuration=replace(SMALL, phases=phases), plugin=plugin)
    assert document["complete"], drive.why_failed(document)
    rows = {name: phase["rows"] for name, phase in document["phases"].items()}
    assert rows["prompts"] == rows["right"]
    assert rows["prompts"] != rows["wrong"]


@pytest.mark.parametrize("started", [False, True])
def test_the_overlay_knows_the_real_card_behind_a_pretended_one(tmp_path, monkeypatch, started):
    """TileLang's code for a forced architecture is assembled for the card that is there."""
    import torch

    from deepinfer_cli.validate.e2e import child as script

    folder = tmp_path / "vllm" / "deepinfer_sm80"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "gate.py").write_text("def capability():\n    return (8, 0)\n")
    vllm = ModuleType("vllm")
    vllm.__path__ = [str(tmp_path / "vllm")]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    for name in ("vllm.deepinfer_sm80", "vllm.deepinfer_sm80.gate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    script._tell_payload_the_card()
    gate = importlib.import_module("vllm.deepinfer_sm80.gate")
    assert gate.capability() == ((9, 0) if started else None)
    for name in ("vllm.deepinfer_sm80", "vllm.deepinfer_sm80.gate"):
        del sys.modules[name]
