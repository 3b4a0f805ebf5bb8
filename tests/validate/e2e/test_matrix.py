"""The GPU matrix without a GPU: its jobs, its verdicts, and the faults that it plants."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from deepinfer_cli.validate.e2e import plan
from tests.validate.e2e import site
from tests.validate.e2e.test_compare import document, rows

torch = pytest.importorskip("torch")
SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return importlib.import_module("gpu_e2e")


@pytest.fixture
def jobs(matrix):
    return importlib.import_module("scripts.gpu_e2e_jobs")


@pytest.fixture
def summary(matrix):
    return importlib.import_module("scripts.gpu_e2e_summary")


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_e2e_faults")


@pytest.fixture
def options(matrix, monkeypatch, tmp_path):
    words = [
        "gpu_e2e.py",
        "--site",
        f"0.33.0={tmp_path}",
        "--work",
        str(tmp_path / "work"),
        "--output",
        str(tmp_path / "o"),
    ]
    monkeypatch.setattr(sys, "argv", words)
    return matrix._options()


def test_every_run_is_held_against_one_that_is_there(jobs, tmp_path):
    made = jobs.make_jobs(tmp_path, {"combine": "accelerate", "gather": "accelerate", "engram": "enable"})
    names = [job.run.name for job in made]
    assert len(set(names)) == len(names)
    by_name = {job.run.name: job for job in made}
    for job in made:
        if job.against is not None:
            other = by_name[job.against]
            mine = {p["name"]: p for p in job.run.configuration.phases}
            theirs = {p["name"]: p for p in other.run.configuration.phases}
            assert job.run.configuration.model == other.run.configuration.model
            if job.run.plugin is None:
                same = {name for name, phase in mine.items() if phase["do"] != "time"}
                assert same <= theirs.keys()
                assert [mine[name].get("lengths") for name in same] == [
                    theirs[name].get("lengths") for name in same
                ]
        assert job.overlay == (job.run.arch is not None or not job.run.off_switch)
    assert by_name["timed-enable"].run.off == ("combine",)
    assert {job.version for job in made} == {"0.33.0", "0.32.0", "0.31.0", "0.30.0"}
    waiting = [job for job in made if job.alone]
    assert len(waiting) == 2 and all(
        "after" in phase for job in waiting for phase in job.run.configuration.phases
    )
    assert all(job.run.kv_bytes is None for job in waiting)


def test_each_fault_of_the_matrix_can_be_planted(jobs, faults):
    assert set(jobs.FAULT_NAMES) == set(faults.FAULTS)


def test_a_pipeline_must_exchange_in_order(jobs):
    workers = [{"one_stream": True}, {"one_stream": False}]
    assert "stage 1" in jobs.exchanges_in_order({"answer": {"workers": workers}})
    assert jobs.exchanges_in_order({"answer": {"workers": workers[:1]}}) == ""
    assert jobs.exchanges_in_order({"answer": None}) == ""


def test_what_a_release_refuses_must_be_refused_with_its_words(jobs):
    runs = jobs.Job(plan.Run("one", plan.CONFIGURATIONS["pp2"]))
    refused = jobs.Job(runs.run, refused="routing requires")
    assert jobs.ending(runs, "") == []
    assert jobs.ending(runs, "engine: out of memory") == ["engine: out of memory"]
    assert jobs.ending(refused, "engine: MoE routing requires input_ids.") == []
    assert jobs.ending(refused, "") == ["vLLM was to refuse it with 'routing requires'"]
    assert jobs.ending(refused, "engine: out of memory")[0] == "engine: out of memory"


def test_a_fault_must_be_found_and_none_must_not(summary):
    stock, wrong = document(), document()
    wrong["phases"] = {
        "prompts": {"rows": rows()},
        "sink dropped": {"rows": [{**row, "nll": [v + 0.1 for v in row["nll"]]} for row in rows()]},
        "not planted at all": {"rows": rows()},
    }
    found = summary.planted(wrong, stock)
    assert {name: one["found"] for name, one in found.items()} == {
        "prompts": True, "sink dropped": True, "not planted at all": False,
    }  # fmt: skip
    wrong["phases"] = {"prompts": {"rows": []}}
    assert not summary.planted(wrong, stock)["prompts"]["found"]


def worker(**more):
    report = {"bound": [], **more.pop("report", {})}
    return {"answer": {"workers": [{"report": report, "held": [], "payload_modules": [], **more}]}}


def test_a_process_that_must_not_use_the_overlay(jobs):
    assert (
        jobs.nothing_bound(worker(payload_modules=["vllm.deepinfer_sm80", "vllm.deepinfer_sm80.gate"])) == ""
    )
    assert "bound" in jobs.nothing_bound(worker(report={"bound": [{"op": "gather"}]}))
    assert "bound" in jobs.nothing_bound(worker(held=["vllm.x.gather"]))
    assert "imported" in jobs.nothing_bound(worker(payload_modules=["vllm.deepinfer_sm80.ops.gather"]))
    assert "not in this vLLM" in jobs.nothing_bound({"answer": {"workers": [{"report": None}]}})


def test_fewer_kv_blocks_fail(summary):
    def timed(blocks, milliseconds):
        phases = {"times": {"prefill_ms": {"median": milliseconds}}}
        return {"answer": {"kv_blocks": blocks}, "kv_tokens": 1, "phases": phases}

    good = summary.gain({"timed-accelerate": timed(10, 2.0), "timed-enable": timed(10, 3.0)})
    assert good["ok"] and good["prefill_ms"]["ratio"] == 1.5
    assert not summary.gain({"timed-accelerate": timed(9, 2.0), "timed-enable": timed(10, 3.0)})["ok"]
    assert summary.gain({}) == {}


def test_a_small_matrix_runs_to_its_end(matrix, options, tmp_path):
    place = site.make(tmp_path / "site")
    small = plan.Configuration(
        "small", phases=({"name": "prompts", "do": "generate", "lengths": [7], "tokens": 2},)
    )
    one = matrix.Job(plan.Run("one", small, kv_bytes=1), overlay=False)
    first = matrix.Job(plan.Run("first", small), overlay=False, against="one", alone=True)
    options.work.mkdir()
    options.timeout = 60.0
    run = matrix.Matrix(options, {("0.33.0", False): place}, [first, one])
    run.run()
    assert run.write_summary()["ok"]
    assert {path.name for path in options.output.iterdir()} == {"summary.json", "runs.tar.gz"}


def test_one_scale_of_each_gathered_row_is_ignored(faults):
    pages, size = torch.zeros(3, 2, 584, dtype=torch.uint8), 2
    flat = pages.view(3, -1)
    flat[:, size * 576 + 3] = 120
    flat[:, size * 576 + 8 + 3] = 121
    out = torch.ones(1, 6, 512)
    faults._ignore_scale(3, out, pages, torch.tensor([4]), torch.tensor([3]), torch.tensor([[2, 0]]), size, 1)
    assert out[0, :, 0].tolist() == [1] * 6
    # positions 1, 2, 3 are rows 1, 0, 1 of their pages
    assert out[0, :, 192].tolist() == [1, 64, 128, 64, 1, 1]
    assert out[0, :, 255].tolist() == [1, 64, 128, 64, 1, 1]
    assert out[0, :, 256].tolist() == [1] * 6


def test_a_fault_in_stock_would_prove_nothing(faults):
    module = types.SimpleNamespace(__name__="rocm", f=lambda a: a)
    with pytest.raises(RuntimeError, match="not ours"):
        faults._wrap(module, "f", lambda real, given: None)
    module.f.__deepinfer__ = {}
    undo = faults._wrap(module, "f", lambda real, given: real(given["a"] + 1))
    assert module.f(1) == 2
    undo()
    assert module.f(1) == 1
