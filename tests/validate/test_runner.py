from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import payload
from deepinfer_cli.validate import runner
from deepinfer_cli.validate.model import Status

pytestmark = pytest.mark.kernels


def _statuses(job, cases=None):
    return {result.case: result.status for result in runner.run_cases(job, cases)}


def test_every_case_gets_its_own_result(fake_job):
    results = list(runner.run_cases(fake_job("good", "wrong", "raise", "scribble", "print", "gpu")))
    assert {result.case: result.status for result in results} == {
        "fake[good]": Status.PASSED,
        "fake[wrong]": Status.FAILED,
        "fake[raise]": Status.RUNTIME_ERROR,
        "fake[scribble]": Status.FAILED,
        "fake[print]": Status.PASSED,
    }
    by_case = {result.case: result for result in results}
    wrong = by_case["fake[wrong]"]
    assert wrong.reason == "out: 1 of 8 elements not bit-exact"
    assert wrong.first_bad.index == (3,)
    assert wrong.max_abs == pytest.approx(1.0, rel=1e-5)
    assert wrong.matched_ratio == 7 / 8
    assert by_case["fake[raise]"].reason == "RuntimeError: the kernel is unhappy"
    assert by_case["fake[scribble]"].reason == "inputs were written to: x"


@pytest.mark.parametrize(
    ("what", "reason"),
    [("segfault", "the worker was killed by SIGSEGV"), ("exit", "the worker ended with exit code 7")],
)
def test_a_crash_is_blamed_on_the_running_case_and_the_rest_still_runs(fake_job, what, reason):
    results = {result.case: result for result in runner.run_cases(fake_job("first", what, "last"))}
    assert [results[f"fake[{name}]"].status for name in ("first", what, "last")] == [
        Status.PASSED,
        Status.RUNTIME_ERROR,
        Status.PASSED,
    ]
    crashed = results[f"fake[{what}]"]
    assert crashed.reason == reason
    if what == "segfault":
        assert "about to crash" in crashed.extra["stderr"]


def test_a_hang_is_a_timeout_and_the_rest_still_runs(fake_job):
    # start-up imports torch and triton, so the limit cannot be tighter
    statuses = _statuses(fake_job("hang", "last", timeout_s=12.0))
    assert statuses == {"fake[hang]": Status.TIMEOUT, "fake[last]": Status.PASSED}


def test_only_the_named_cases_run(fake_job):
    assert _statuses(fake_job("good", "wrong"), ["fake[good]"]) == {"fake[good]": Status.PASSED}


def test_other_bytes_than_asked_for_are_no_result(fake_job):
    with pytest.raises(FailedError) as caught:
        list(runner.run_cases(fake_job("good", digest="0" * 64)))
    assert caught.value.code == "payload-mismatch"


def test_a_payload_that_cannot_be_imported_is_one_runtime_error(fake_job, case_payload: Path):
    (case_payload / "ops" / "fake" / "workloads.py").write_text("import no_such_module\n")
    (result,) = runner.run_cases(fake_job("good"))
    assert (result.case, result.status) == ("fake[start]", Status.RUNTIME_ERROR)
    assert "no_such_module" in result.extra["stderr"]


def test_a_check_leaves_no_file_in_the_payload(fake_job, case_payload: Path):
    before = sorted(case_payload.rglob("*"))
    _statuses(fake_job("good"))
    assert sorted(case_payload.rglob("*")) == before


def _workers(monkeypatch: pytest.MonkeyPatch, *events):
    def play(job, cases, crew):
        yield from events

    monkeypatch.setattr(runner, "events", play)


def test_a_case_that_a_worker_leaves_without_a_result_did_not_pass(fake_job, monkeypatch):
    plan = {"event": "plan", "cases": ["a", "b"]}
    start = {"event": "start", "case": "a"}
    _workers(monkeypatch, plan | {"cases": ["a"]}, start, {"event": "done"}, runner.WorkerEnd(Status.PASSED))
    assert _statuses(fake_job("a")) == {"a": Status.RUNTIME_ERROR}
    _workers(monkeypatch, plan, {"event": "done"}, runner.WorkerEnd(Status.PASSED))
    assert set(_statuses(fake_job("a")).values()) == {Status.RUNTIME_ERROR}


def test_a_line_that_a_death_cut_off_is_no_event(fake_job, tmp_path: Path):
    script = tmp_path / "dying worker"
    script.write_text(
        '#!/bin/sh\necho \'{"event": "plan", "cases": ["a"]}\'\nprintf \'{"event": "sta\'\nexit 9\n'
    )
    script.chmod(0o755)
    results = list(runner.run_cases(dataclasses.replace(fake_job("a"), python=script)))
    assert [(item.case, item.status) for item in results] == [
        ("fake[start]", Status.RUNTIME_ERROR),
        ("a", Status.RUNTIME_ERROR),
    ]
    assert results[0].reason == "the worker ended with exit code 9"


def test_the_callers_switches_do_not_reach_a_worker(
    fake_job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "telling worker"
    tell = "import json, os; print(json.dumps({'event': 'env', 'env': dict(os.environ)}))"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{tell}"\n')
    script.chmod(0o755)
    switches = (
        "TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH", "DEEPINFER_DISABLE", "DEEPINFER_DISABLE_OPS", "DEEPINFER_FORCE_ARCH",
    )  # fmt: skip
    for name in switches:
        monkeypatch.setenv(name, "1")
    job = dataclasses.replace(fake_job("a"), python=script, env={"TRITON_INTERPRET": "2"})
    told = next(iter(runner.events(job)))["env"]
    assert {name: told.get(name) for name in switches} == dict.fromkeys(switches) | {"TRITON_INTERPRET": "2"}


def test_compile_caches_begin_empty_unless_the_user_has_some(fake_job, tmp_path: Path, monkeypatch):
    script = tmp_path / "telling worker"
    tell = "import json, os; print(json.dumps({'event': 'env', 'env': dict(os.environ)}))"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{tell}"\n')
    script.chmod(0o755)
    job = dataclasses.replace(fake_job("a"), python=script)

    def told(**changes):
        env = next(iter(runner.events(dataclasses.replace(job, **changes))))["env"]
        return [env[name] for name in runner.CACHES]

    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
    assert told()[0] == "/mine" and "deepinfer-" in told()[1]
    assert runner.shared_caches("/shared") == {"TILELANG_CACHE_DIR": "/shared"}
    assert told(env=runner.shared_caches("/shared")) == ["/mine", "/shared"]
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/mine")
    assert told() == ["/mine", "/mine"]
    assert told(fresh=("TILELANG_CACHE_DIR",))[1] != "/mine"


def test_what_start_up_files_print_is_no_event(fake_job, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("print('welcome'); print('{}'); print(3)\n")
    job = dataclasses.replace(fake_job("good"), path=(tmp_path,))
    assert _statuses(job) == {"fake[good]": Status.PASSED}


_INTERRUPTED = """
import signal
import sys
from pathlib import Path
from deepinfer_cli.validate import runner
job = runner.Job(Path(sys.executable), {request!r}, {env!r}, 300.0)
# a shell that runs the tests in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
list(runner.run_many([job, job], None, {at_once}))
"""


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_interrupt_leaves_no_worker_behind(fake_job, case_payload: Path, tmp_path: Path, at_once: int):
    job = fake_job("hang")
    script = tmp_path / "interrupted.py"
    pid_file = tmp_path / "pid"
    workloads = case_payload / "ops" / "fake" / "workloads.py"
    workloads.write_text(
        workloads.read_text().replace(
            "time.sleep(600)", f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        )
    )

    request = job.request | {"digest": payload.load(case_payload).digest}
    script.write_text(_INTERRUPTED.format(request=request, env=job.env, at_once=at_once))
    parent = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        worker = int(pid_file.read_text())
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=20) != 0
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
    finally:
        parent.kill()


def test_jobs_side_by_side_give_their_results_in_order(fake_job):
    slow = fake_job("good", "exit", "last")
    quick = dataclasses.replace(fake_job("wrong"), timeout_s=30.0)
    results = list(runner.run_many([slow, quick], None, at_once=2))
    assert [(item.case, item.status) for item in results] == [
        ("fake[good]", Status.PASSED),
        ("fake[exit]", Status.RUNTIME_ERROR),
        ("fake[last]", Status.PASSED),
        ("fake[wrong]", Status.FAILED),
    ]


def test_what_one_thread_raises_ends_all_workers(fake_job):
    import threading

    jobs = [fake_job("good", digest="0" * 64), fake_job("hang"), fake_job("hang")]
    with pytest.raises(FailedError, match="digest"):
        list(runner.run_many(jobs, None, at_once=2))
    assert threading.active_count() == 1


def test_the_probe_says_what_an_interpreter_has():
    found = runner.probe(Path(sys.executable))
    assert found["torch"] and found["triton"]
    assert found["gpu"] is None or "name" in found["gpu"] or "problem" in found["gpu"]


def test_an_interpreter_that_is_not_there_is_a_problem_not_a_crash(tmp_path: Path):
    assert "problem" in runner.probe(tmp_path / "no-python")
