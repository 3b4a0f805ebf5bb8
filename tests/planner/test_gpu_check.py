"""The comparison with vLLM on a GPU, without one: its rows, its verdicts, and its children with a stand-in engine."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_cli.planner import kv, shape
from tests.validate.e2e import site

pytest.importorskip("torch")
SCRIPTS = Path(__file__).parents[2] / "scripts"
WORKER = """
from collections import namedtuple

CompilationTimes = namedtuple("CompilationTimes", "language_model encoder")


class Worker:
    rank = 0

    def determine_available_memory(self):
        raise AssertionError("a pool row runs no forward pass")

    def compile_or_warm_up_model(self):
        raise AssertionError("no row warms up")
"""
# what the child asks an engine and a worker for, and no more
ENGINE = """
torch.cuda.mem_get_info = lambda *a: (1, 2)
torch.cuda.device_count = lambda *a: 1


class LLM:
    def __init__(self, model, load_format, **settings):
        from vllm.v1.worker.gpu_worker import Worker

        worker = Worker()
        module = torch.nn.Module()
        module.model_runner = None
        worker.model_runner = types.SimpleNamespace(get_model=lambda: module, model_memory_usage=5)
        assert worker.compile_or_warm_up_model().encoder == 0.0
        blocks = worker.determine_available_memory() // 69_696 + int(os.environ.get("FAKE_FAULT") or 0)
        per_request = (settings["max_model_len"] // 64 + 8 * 133 + 1)
        cache = types.SimpleNamespace(
            num_gpu_blocks=blocks, kv_cache_max_concurrency=blocks / per_request,
            kv_cache_size_tokens=int(blocks / per_request * settings["max_model_len"]),
        )
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(cache_config=cache))
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return importlib.import_module("gpu_plan_check")


@pytest.fixture
def vllm(tmp_path):
    folder = site.make(tmp_path / "site")
    package = folder / "vllm"
    (package / "v1" / "worker").mkdir(parents=True)
    for name in ("v1/__init__.py", "v1/worker/__init__.py"):
        (package / name).touch()
    (package / "v1" / "worker" / "gpu_worker.py").write_text(WORKER)
    with (package / "__init__.py").open("a") as stream:
        stream.write(ENGINE)
    return folder


def run(script, vllm, tmp_path, monkeypatch, *more):
    words = ["x", "--site", f"0.33.0={vllm}", "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path / "out.json"), *more])
    code = script.main()
    return code, json.loads((tmp_path / "out.json").read_text())


def test_a_row_that_agrees(script, vllm, tmp_path, monkeypatch):
    code, content = run(script, vllm, tmp_path, monkeypatch, "--only", "prefix-caching")
    (row,) = content["rows"]
    assert row["ok"], row["problem"]
    assert row["vllm"]["tokens"] == row["planner"]["tokens"]
    assert row["workers"][0]["available"] == 4 << 30
    assert content["environment"]["gpu"] == "fake GPU"
    assert code == 0


def test_a_row_that_differs(script, vllm, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FAULT", "1000")
    code, content = run(script, vllm, tmp_path, monkeypatch, "--only", "prefix-caching")
    assert code == 1
    assert "vLLM says" in content["rows"][0]["problem"]


def test_an_engine_that_does_not_start(script, tmp_path, monkeypatch):
    folder = site.make(tmp_path / "empty")
    code, content = run(script, folder, tmp_path, monkeypatch, "--only", "prefix-caching")
    assert code == 1
    assert "ModuleNotFoundError" in content["rows"][0]["problem"]


def test_every_row_can_be_planned(script):
    names = [row.name for row in script.ROWS]
    assert len(set(names)) == len(names)
    assert len([row for row in script.ROWS if row.do == "pool" and row.gpus == 1]) >= 8
    for row in script.ROWS:
        small = shape.from_config(row.config())
        partition = row.partition or (small.layers,)
        pool = kv.pool(
            small,
            partition,
            row.traffic(),
            [int(gib * 2**30) for gib in row.gib] * (len(partition) // len(row.gib)),
        )
        assert pool.starts, row.name
        assert row.settings()["max_model_len"] <= small.positions
        cuts = [sum(partition[: index + 1]) for index in range(len(partition) - 1)]
        assert set(cuts) <= set(small.cuts), row.name


def test_two_gpus_may_differ_more(script):
    row = next(row for row in script.ROWS if row.name == "tp2")
    event = {"worker": {"stage": 0, "available": 4 << 30}}
    planned = script.compare(row, [event, {"vllm": {"tokens": 1}}])["planner"]["tokens"]
    for given, far in ((row, 0.015), (replace(row, engine={}), 0.005)):
        assert script.compare(given, [event, {"vllm": {"tokens": int(planned * (1 + far))}}])["ok"]
        assert not script.compare(given, [event, {"vllm": {"tokens": int(planned * (1 + 3 * far))}}])["ok"]


def test_what_vllm_refuses_must_be_refused(script):
    row = next(row for row in script.ROWS if row.name == "pp2-stock")
    told = {"error": "RuntimeError: Worker failed with error ''"}
    assert script.compare(row, [told])["ok"]
    assert not script.compare(row, [{"error": "ValueError: no GPU"}])["ok"]
    assert not script.compare(row, [{"worker": {}}, {"vllm": {"tokens": 1}}])["ok"]
    small = shape.from_config(row.config())
    assert kv.missing(small, row.partition, row.traffic())
