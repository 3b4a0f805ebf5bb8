from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepinfer_cli.commands import bench as command
from deepinfer_cli.errors import ExitCode, FailedError, UnsupportedError, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay import payload
from deepinfer_cli.overlay.closure import op_digest
from deepinfer_cli.validate import bench, results, runner
from deepinfer_cli.validate.model import Status
from tests.validate.test_results import result, row

ROOT = Path(__file__).parent.parent.parent


def _request(root: Path, **more) -> bench.Request:
    return bench.Request(root, Path(sys.executable), ("fake",), **more)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        pytest.param({"torch": "2", "triton": "3", "gpu": None}, "gpu-not-found", id="no-gpu"),
        pytest.param(
            {"torch": "2", "triton": "3", "gpu": {"problem": "no driver"}}, "gpu-not-found", id="broken"
        ),
        pytest.param({"torch": None, "triton": "3"}, "nothing-runnable", id="no-torch"),
        pytest.param({"problem": "no such file"}, "nothing-runnable", id="no-python"),
        pytest.param(
            {"torch": "2", "triton": "3", "gpu": {"name": "NVIDIA H200", "capability": [9, 0]}},
            "arch-unsupported",
            id="newer-card",
        ),
    ],
)
def test_without_a_gpu_nothing_is_measured(case_payload: Path, monkeypatch, found, code):
    monkeypatch.delenv("DEEPINFER_FORCE_ARCH", raising=False)
    monkeypatch.setattr(bench.runner, "probe", lambda python: found)
    with pytest.raises(UnsupportedError) as caught:
        bench.measure(_request(case_payload))
    assert caught.value.code == code and caught.value.hint


def _feed(monkeypatch: pytest.MonkeyPatch, *workers):
    """Lets `workers`, lists of events, run one after the other instead of real ones; gives what each was asked."""
    gpu = {"name": "NVIDIA A100", "capability": [8, 0]}
    asked: list[list[str] | None] = []
    feed = iter(workers)

    def events(job, cases, crew):
        asked.append(cases)
        yield from next(feed)

    monkeypatch.setattr(bench.runner, "probe", lambda python: {"torch": "2", "triton": "3", "gpu": gpu})
    monkeypatch.setattr(bench.runner, "events", events)
    return asked


PLAN = {"event": "plan", "cases": ["a", "b", "c"]}
ENVIRONMENT = {"event": "environment", "environment": {"gpu": "NVIDIA A100", "copy_gb_per_s": 1500.0}}


def _case(name: str, *rows):
    done = [{"event": "row", "row": item} for item in rows] + [{"event": "case_done", "case": name}]
    return [{"event": "start", "case": name, "params": {"tokens": 1}}, *done]


def test_a_crash_becomes_a_row_and_the_rest_is_measured(case_payload: Path, monkeypatch):
    crash = runner.WorkerEnd(Status.RUNTIME_ERROR, "the worker was killed by SIGSEGV", "boom")
    first = [ENVIRONMENT, PLAN, *_case("a", row()), *_case("b")[:1], crash]
    second = [PLAN | {"cases": ["c"]}, *_case("c", row(p50=7.0)), runner.WorkerEnd(Status.PASSED)]
    asked = _feed(monkeypatch, first, second)
    found = bench.measure(_request(case_payload))
    assert asked == [None, ["b", "c"][1:]]
    assert [item["status"] for item in found["rows"]] == ["PASSED", "RUNTIME_ERROR", "PASSED"]
    assert found["rows"][1]["latency_us"] is None and "SIGSEGV" in found["rows"][1]["reason"]
    assert list(found["environment"])[:7] == ["gpu", "driver", "cuda", "torch", "triton", "tilelang", "vllm"]
    assert found["environment"]["commit"].startswith("payload ")
    assert found["environment"]["kernels"] == {"fake": op_digest(payload.load(case_payload), "fake")}


def test_several_ops_are_measured_side_by_side_and_come_in_order(case_payload: Path, monkeypatch):
    import threading

    monkeypatch.setattr(bench.os, "cpu_count", lambda: 16)
    _feed(monkeypatch)
    both, jobs, parts = threading.Barrier(2, timeout=30), {}, []

    def events(job, cases, crew):
        jobs[job.request["op"]] = job
        both.wait()
        yield from [
            ENVIRONMENT,
            PLAN | {"cases": ["a"]},
            *_case("a", row(job.request["op"])),
            runner.WorkerEnd(Status.PASSED),
        ]

    monkeypatch.setattr(bench.runner, "events", events)
    request = bench.Request(case_payload, Path(sys.executable), ("one", "two"))
    found = bench.measure(request, on_op=parts.append)
    assert [item["op"] for item in found["rows"]] == ["one", "two"]
    # what has been measured can be kept before the rest is
    assert [len(part["rows"]) for part in parts] == [1, 2] and parts[1] == found
    assert {job.request["threads"] for job in jobs.values()} == {8}
    overlay = payload.load(case_payload)
    assert [part["environment"]["kernels"] for part in parts] == [
        {op: op_digest(overlay, op) for op in ops} for ops in (("one",), ("one", "two"))
    ]


def test_a_worker_that_dies_before_its_first_case_is_an_error(case_payload: Path, monkeypatch):
    _feed(
        monkeypatch, [runner.WorkerEnd(Status.RUNTIME_ERROR, "the worker ended with exit code 1", "no CUDA")]
    )
    with pytest.raises(FailedError) as caught:
        bench.measure(_request(case_payload))
    assert (caught.value.code, caught.value.hint) == ("worker-crashed", "no CUDA")


# the command


def _run(monkeypatch, case_payload: Path, measured, **options):
    monkeypatch.setattr(command, "find_target", lambda where, out: None)
    monkeypatch.setattr(command, "payload_root", lambda target, out: case_payload)
    monkeypatch.setattr(command.bench, "measure", lambda request, on_row, on_note: measured)
    return command.run(command.BenchOptions(**options), Output())


def test_the_table_has_latency_speed_up_and_share_of_the_ceiling(case_payload, monkeypatch, capsys, tmp_path):
    measured = result(row(), row(provider="stock", p50=100.0, codegen="native"))
    output = tmp_path / "new.json"
    found = _run(monkeypatch, case_payload, measured, output=output)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == [
        "Op", "Case", "Provider", "Code", "Timing", "Latency (us)", "p20-p80 (us)", "vs stock", "GB/s", "TFLOP/s",
        "Ceiling", "Status",
    ]  # fmt: skip
    assert lines[1] == ["gather", "tokens=49152", "overlay", "sm80", "graph", "20.0", "20.0-20.0", "5.00x", "0", "-", "50 % of copy", "PASSED"]  # fmt: skip
    assert lines[2][7] == "-"
    assert found.exit_code == ExitCode.OK and results.read(output) == measured


def test_what_multiplies_shows_its_rate_and_the_ceiling_that_binds(case_payload, monkeypatch, capsys):
    rates = {"sm80": 422.0, "sm86": 401.5}
    measured = result(row(flops=4_000_000_000, ceiling="mma"), mma_tflops=rates, kernels={"gather": "1a2b"})
    _run(monkeypatch, case_payload, measured)
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].split("\t")[8:] == ["200.0", "50 % of mma", "PASSED"]
    assert "mma_tflops 422.0 (sm80)/401.5 (sm86)" in captured.err and "1a2b" not in captured.err


def test_a_limit_on_shared_memory_reaches_the_worker(case_payload, monkeypatch):
    _feed(monkeypatch, [ENVIRONMENT, PLAN, *_case("a", row()), runner.WorkerEnd(Status.PASSED)])
    jobs = []
    monkeypatch.setattr(bench, "_events", lambda job, crew: jobs.append(job) or [])
    bench.measure(_request(case_payload, max_smem=49152))
    (job,) = jobs
    assert (job.request["max_smem"], job.request["arch"], job.request["force_arch"]) == (49152, "sm80", None)
    # what TileLang compiled is only seen while it does
    assert job.fresh == ("TILELANG_CACHE_DIR",)


def test_a_regression_is_exit_1_and_names_the_case(case_payload, monkeypatch, capsys, tmp_path):
    baseline = tmp_path / "old.json"
    results.write(result(row(p50=20.0)), baseline)
    fine = _run(monkeypatch, case_payload, result(row(p50=21.9)), baseline=baseline)
    assert (fine.exit_code, fine.data["baseline"]["compared"]) == (ExitCode.OK, 1)
    slow = _run(monkeypatch, case_payload, result(row(p50=22.1)), baseline=baseline)
    assert slow.exit_code == ExitCode.FAILED
    assert slow.errors[0].code == "regression" and "tokens=49152" in slow.errors[0].message
    strict = _run(monkeypatch, case_payload, result(row(p50=21.9)), baseline=baseline, threshold=0.05)
    assert strict.exit_code == ExitCode.FAILED


def test_a_red_overlay_is_exit_1_and_a_red_baseline_is_said(case_payload, monkeypatch, capsys):
    bad = row(p50=None, status="FAILED", reason="out: 1 of 8 elements not bit-exact", ceiling_fraction=None)
    stock = row(provider="stock", p50=None, status="COMPILE_ERROR", reason="fp8e4nv", ceiling_fraction=None)
    found = _run(monkeypatch, case_payload, result(bad, stock))
    assert found.exit_code == ExitCode.FAILED
    assert [item.code for item in found.errors] == ["case-failed"]
    assert "stock: COMPILE_ERROR fp8e4nv" in capsys.readouterr().err


def test_a_run_that_measured_nothing_is_no_success(case_payload, monkeypatch, capsys):
    stock = row(provider="stock", p50=None, status="SKIPPED", reason="no vLLM", ceiling_fraction=None)
    found = _run(monkeypatch, case_payload, result(stock), providers=("stock",))
    assert (found.exit_code, found.errors[0].code) == (ExitCode.UNSUPPORTED, "nothing-runnable")


@pytest.mark.parametrize("options", [{"ops": ("decode",)}, {"arch": "volta"}, {"providers": ("magic",)}])
def test_unknown_choices_are_usage_errors(case_payload, monkeypatch, options):
    with pytest.raises(UsageError):
        _run(monkeypatch, case_payload, result(), **options)
