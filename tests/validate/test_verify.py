from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from deepinfer_cli.commands import verify as command
from deepinfer_cli.commands import verify_table
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.errors import ExitCode, FailedError, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay import payload
from deepinfer_cli.validate import levels as verify_levels
from deepinfer_cli.validate import runner, verify
from deepinfer_cli.validate.forced import ARCHS, code_name, forced_arch
from deepinfer_cli.validate.model import CaseResult, FirstBad, Level, NotRun, Status, VerifyReport
from deepinfer_cli.validate.request import Request, Run

H200 = {"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 1}


@pytest.fixture(autouse=True)
def _fake_cases(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_CASES", "good,last")


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter that has no torch."""
    path = tmp_path / "bare python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _request(root: Path, *levels: Level, **more) -> Request:
    return Request(None, root, more.pop("python", Path(sys.executable)), levels, **more)


def test_without_torch_every_level_says_why_and_what_to_do(case_payload: Path, bare_python: Path):
    report = verify.verify(_request(case_payload, python=bare_python))
    assert [item.level for item in report.not_run] == list(Level)
    assert not report.ran
    reasons = {item.level: item.reason for item in report.not_run}
    assert reasons[Level.STATIC] == "no vLLM was found, so there is no install to check"
    assert reasons[Level.COMPILE] == f"{bare_python} has no triton and no torch"
    assert all(item.how for item in report.not_run)


@pytest.mark.parametrize(
    ("missing", "tiled", "want"),
    [
        pytest.param({"torch", "triton", "numpy", "tilelang", "nvcc"}, True,
                     {"compile": "torch, triton and tilelang there (pip install torch triton tilelang); install the CUDA toolkit",
                      "interpreter": "torch, triton and numpy there (pip install torch triton numpy); or name",
                      "numerics": "torch, triton and tilelang there (pip install torch triton tilelang); install the CUDA toolkit"},
                     id="nothing-is-there"),
        pytest.param({"torch", "tilelang"}, False,
                     {"compile": "torch there (pip install torch); or name", "interpreter": "torch there (pip install torch)",
                      "numerics": "torch there (pip install torch); or name"}, id="no-op-is-tilelang"),
        pytest.param({"tilelang", "nvcc"}, True,
                     {"compile": "tilelang there (pip install tilelang); install the CUDA toolkit",
                      "numerics": "tilelang there (pip install tilelang); install the CUDA toolkit"}, id="tilelang-alone"),
    ],
)  # fmt: skip
def test_the_hint_names_all_that_the_next_run_would_lack(
    case_payload: Path, monkeypatch: pytest.MonkeyPatch, missing: set[str], tiled: bool, want: dict[str, str]
):
    _write_kernels(case_payload, "both", "triton", *(["tilelang"] if tiled else []))
    found = ALL_FOUND | dict.fromkeys(missing)
    levels = (Level.COMPILE, Level.INTERPRETER, Level.NUMERICS)
    report, _jobs = _planned(monkeypatch, found, _request(case_payload, *levels, arch="sm80"))
    said = {item.level.value: item.how for item in report.not_run}
    assert said.keys() == want.keys()
    for level, text in want.items():
        assert text in said[level] and said[level].endswith("or name an interpreter with --python")


def test_an_interpreter_that_does_not_start_is_not_to_be_given_packages(case_payload, monkeypatch):
    report, _jobs = _planned(monkeypatch, {"problem": "no such file"}, _request(case_payload, Level.COMPILE))
    (item,) = report.not_run
    assert "no such file" in item.reason and "pip" not in item.how and "--python" in item.how


@pytest.mark.kernels
def test_events_come_as_they_happen(case_payload: Path):
    seen = []
    report = verify.verify(_request(case_payload, Level.INTERPRETER), seen.append)
    assert tuple(seen) == report.results
    assert [(item.case, item.status) for item in report.results] == [
        ("fake[good]", Status.PASSED),
        ("fake[last]", Status.PASSED),
    ]


@pytest.mark.kernels
def test_one_case_runs_alone(case_payload: Path):
    report = verify.verify(_request(case_payload, Level.INTERPRETER, case="fake[last]"))
    assert [item.case for item in report.results] == ["fake[last]"]
    with pytest.raises(UsageError, match=r"no case fake\[none\]"):
        verify.verify(_request(case_payload, Level.INTERPRETER, case="fake[none]"))


def test_one_case_names_no_level_that_has_no_such_case(monkeypatch: pytest.MonkeyPatch, case_payload: Path):
    levels = dict(verify.LEVELS)
    levels[Level.STATIC] = lambda run: iter(
        [CaseResult("overlay[hooks]", "overlay", Level.STATIC, Status.PASSED)]
    )
    for level in set(Level) - {Level.STATIC}:
        levels[level] = lambda run, level=level: iter([NotRun(level, "no torch", "install it")])
    monkeypatch.setattr(verify, "LEVELS", levels)
    assert verify.verify(_request(case_payload, case="overlay[hooks]")).not_run == ()
    (asked,) = verify.verify(_request(case_payload, Level.STATIC, Level.LIVE, case="overlay[hooks]")).not_run
    assert asked.level is Level.LIVE
    levels[Level.INTERPRETER] = lambda run: iter(
        [CaseResult("fake[good]", "fake", Level.INTERPRETER, Status.PASSED)]
    )
    (other,) = verify.verify(_request(case_payload, case="fake[good]")).not_run
    assert other.level is Level.NUMERICS


def test_every_check_of_the_compile_gate_is_a_row():
    build = {"registers": 90, "shared_bytes": 512, "spill_bytes": 0, "ctas_per_sm": 5}
    results = tuple(
        CaseResult(f"gather[sm80:{name}]", "gather", Level.COMPILE, Status.PASSED, extra=extra)
        for name, extra in (("wide", build), ("small", {"shared_bytes": 512}))
    )
    (rows,) = verify_table.tables(VerifyReport(results, (), {}, (), 0.0))
    assert [row[0] for row in rows.rows] == ["gather[sm80:wide]", "gather[sm80:small]"]
    assert rows.rows[1] == ("gather[sm80:small]", "-", "512", "-", "-", "PASSED")


@pytest.mark.kernels
def test_a_worker_that_does_not_start_fails_one_case_too(case_payload: Path):
    (case_payload / "ops" / "fake" / "workloads.py").write_text("import no_such_module\n")
    (failed,) = verify.verify(_request(case_payload, Level.INTERPRETER, case="fake[last]")).failed
    assert failed.case == "fake[start]"


def test_an_unknown_op_is_refused_before_anything_runs(case_payload: Path):
    with pytest.raises(UsageError, match="no op decode"):
        verify.verify(_request(case_payload, ops=("decode",)))


def test_numerics_without_a_gpu_is_not_run(case_payload: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "probe", lambda python: {"torch": "2", "triton": "3", "gpu": None})
    (item,) = verify.verify(_request(case_payload, Level.NUMERICS)).not_run
    assert item.reason == "torch sees no CUDA GPU here"


@pytest.mark.parametrize(
    ("capability", "arch", "want"),
    [
        pytest.param((8, 0), None, (None, ""), id="a100-as-it-is"),
        pytest.param((8, 6), "sm86", (None, ""), id="its-own"),
        pytest.param(
            (8, 6), "sm80", (None, "GPU is sm86 and runs its own code, not sm80's"), id="sm8x-is-never-forced"
        ),
        pytest.param((9, 0), "sm80", ("sm80", ""), id="newer-card-forced"),
    ],
)
def test_what_is_forced_on_a_card(capability, arch, want, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DEEPINFER_FORCE_ARCH", raising=False)
    assert forced_arch({"name": "GPU", "capability": list(capability)}, arch) == want


@pytest.mark.parametrize(("capability", "word"), [((9, 0), "stock"), ((8, 7), "serves"), ((7, 5), "serves")])
def test_cards_whose_code_cannot_run_say_why(capability, word, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DEEPINFER_FORCE_ARCH", raising=False)
    forced, problem = forced_arch({"name": "GPU", "capability": list(capability)}, None)
    assert forced is None and word in problem


def test_the_users_own_switch_forces_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm86")
    assert forced_arch(H200, None) == ("sm86", "")
    assert code_name(H200, "sm86") == "sm86 code on NVIDIA H200"
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", " SM80 ")
    assert forced_arch(H200, None) == ("sm80", "")
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm90")
    assert forced_arch(H200, None) == (
        None,
        "DEEPINFER_FORCE_ARCH=sm90 is unknown; known are sm80, sm86, sm89",
    )


def _planned(monkeypatch: pytest.MonkeyPatch, found: dict, request: Request):
    """What `verify` says without running anything, and the jobs that it would have run."""
    jobs = []
    monkeypatch.setattr(runner, "probe", lambda python: found)
    monkeypatch.setattr(runner, "run_many", lambda many, cases, at_once, **more: jobs.extend(many) or [])
    return verify.verify(request), jobs


def _write_kernels(root: Path, op: str, *languages: str):
    folder = root / "ops" / op
    folder.mkdir(exist_ok=True)
    (folder / "workloads.py").touch()
    for name in languages:
        (folder / f"{name}.py").write_text("")


ALL_FOUND = {"torch": "2", "triton": "3", "numpy": "2", "tilelang": "0.1", "nvcc": "/bin/nvcc", "gpu": H200}


@pytest.mark.parametrize(
    ("missing", "word"), [("tilelang", "pip install tilelang"), ("nvcc", "CUDA toolkit")]
)
def test_without_the_tools_of_tilelang_triton_kernels_are_still_built(
    case_payload: Path, monkeypatch: pytest.MonkeyPatch, missing: str, word: str
):
    _write_kernels(case_payload, "both", "triton", "tilelang")
    _write_kernels(case_payload, "tiles", "tilelang")
    found = ALL_FOUND | {missing: None}
    request = _request(case_payload, Level.COMPILE, Level.NUMERICS, arch="sm80")
    report, jobs = _planned(monkeypatch, found, request)
    assert [(item.level, item.reason.partition(":")[0]) for item in report.not_run] == [
        (Level.COMPILE, "TileLang kernels of both, tiles"),
        (Level.NUMERICS, "TileLang kernels of both, tiles"),
    ]
    assert all(word in item.how for item in report.not_run)
    compiled = [job.request for job in jobs if job.request["task"] == "compile"]
    assert [(body["op"], body["languages"], body["complete"]) for body in compiled] == [
        ("both", ["triton"], False)
    ]
    assert [job.request["op"] for job in jobs if job.request["task"] == "cases"] == ["both", "fake"]


@pytest.mark.parametrize(("ran", "said"), [({"triton"}, True), ({"triton", "tilelang"}, False)])
def test_a_fallback_alone_is_no_check_of_the_tilelang_kernels(
    case_payload: Path, monkeypatch: pytest.MonkeyPatch, ran: set[str], said: bool
):
    _write_kernels(case_payload, "both", "triton", "tilelang")
    found = [
        CaseResult(f"both[{name}]", "both", Level.NUMERICS, Status.PASSED, extra={"language": name})
        for name in sorted(ran)
    ]
    monkeypatch.setattr(runner, "probe", lambda python: ALL_FOUND)
    monkeypatch.setattr(runner, "run_many", lambda jobs, cases, at_once, **more: found)
    report = verify.verify(_request(case_payload, Level.NUMERICS, arch="sm80"))
    want = ["TileLang kernels of both: no case launched one"] if said else []
    assert [item.reason for item in report.not_run] == want


def test_every_language_is_built_where_its_tools_are(case_payload: Path, monkeypatch: pytest.MonkeyPatch):
    _write_kernels(case_payload, "both", "triton", "tilelang")
    _write_kernels(case_payload, "tiles", "tilelang")
    for cores, want in ((2, [list(ARCHS)]), (16, [[arch] for arch in ARCHS])):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        report, jobs = _planned(monkeypatch, ALL_FOUND, _request(case_payload, Level.COMPILE))
        assert report.not_run == ()
        assert [(job.request["op"], job.request["languages"], job.request["archs"]) for job in jobs] == [
            (op, languages, archs)
            for op, languages in (("both", ["triton", "tilelang"]), ("tiles", ["tilelang"]))
            for archs in want
        ]


def test_the_interpreter_skips_what_only_tilelang_has(case_payload: Path, monkeypatch: pytest.MonkeyPatch):
    _write_kernels(case_payload, "both", "triton", "tilelang")
    _write_kernels(case_payload, "tiles", "tilelang")
    report, jobs = _planned(monkeypatch, ALL_FOUND, _request(case_payload, Level.INTERPRETER))
    (skipped,) = report.results
    assert (skipped.case, skipped.status) == ("tiles[interpreter]", Status.SKIPPED)
    assert "numerics runs them on a GPU" in skipped.reason
    assert [job.request["op"] for job in jobs] == ["both", "fake"]
    one = _request(case_payload, Level.INTERPRETER, case="tiles[some-case]")
    assert [item.case for item in _planned(monkeypatch, ALL_FOUND, one)[0].results] == ["tiles[some-case]"]


@pytest.mark.parametrize(
    ("suite", "gib", "cores", "want"),
    [("smoke", 139, 16, 16), ("smoke", 24, 16, 8), ("smoke", 24, 2, 2), ("smoke", 2, 16, 1), ("full", 139, 16, 4), ("full", 24, 16, 1)],
)  # fmt: skip
def test_as_many_workers_share_a_card_as_it_has_room_for(case_payload, monkeypatch, suite, gib, cores, want):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    run = Run(_request(case_payload, suite=suite), "", (), {}, {"gpu": {"memory_bytes": gib * 2**30}})
    assert verify_levels._gpu_at_once(run) == want


def test_levels_run_side_by_side_where_there_are_cores_and_come_in_order(case_payload, monkeypatch):
    both = threading.Barrier(2, timeout=30)

    def fake(level: Level, *, meet: bool):
        def outcomes(run):
            if meet:
                both.wait()
            yield CaseResult("fake[a]", "fake", level, Status.PASSED)

        return outcomes

    levels = {level: fake(level, meet=level in (Level.COMPILE, Level.NUMERICS)) for level in Level}
    monkeypatch.setattr(verify, "LEVELS", levels)
    monkeypatch.setattr(runner, "probe", lambda python: ALL_FOUND)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    report = verify.verify(_request(case_payload))
    assert [item.level for item in report.results] == list(Level)
    assert [(level, op) for level, op, _seconds in report.seconds] == [(level, "") for level in Level]
    # one after the other, the barrier would never open
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=0.2)
    with pytest.raises(threading.BrokenBarrierError):
        verify.verify(_request(case_payload))


def test_a_level_that_fails_ends_the_workers_of_the_others(case_payload, monkeypatch):
    running, ended = threading.Event(), threading.Event()

    def compile_(run):
        assert running.wait(30)
        raise FailedError("the overlay changed", code="payload-mismatch")
        yield

    def numerics(run):
        crew = run.crew.part()
        running.set()
        for _ in range(3000):
            if crew.stopped:
                ended.set()
                return
            time.sleep(0.01)
        yield CaseResult("fake[a]", "fake", Level.NUMERICS, Status.PASSED)

    monkeypatch.setattr(verify, "LEVELS", {Level.COMPILE: compile_, Level.NUMERICS: numerics})
    monkeypatch.setattr(runner, "probe", lambda python: ALL_FOUND)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    with pytest.raises(FailedError, match="the overlay changed"):
        verify.verify(_request(case_payload, Level.COMPILE, Level.NUMERICS))
    assert ended.is_set()


def test_the_interpreters_cases_are_shared_out_where_there_are_cores(case_payload, monkeypatch):
    for cores, want in ((2, [[0, 1]]), (16, [[0, 3], [1, 3], [2, 3]])):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        _report, jobs = _planned(monkeypatch, ALL_FOUND, _request(case_payload, Level.INTERPRETER))
        assert [job.request["part"] for job in jobs] == want
    one = _request(case_payload, Level.INTERPRETER, case="fake[last]")
    alone = []
    monkeypatch.setattr(runner, "run_many", lambda many, cases, at_once, **more: alone.extend(many) or [])
    with pytest.raises(UsageError, match="no case"):
        verify.verify(one)
    assert [job.request["part"] for job in alone] == [[0, 1]]


@pytest.mark.kernels
def test_parts_of_an_op_make_a_whole_and_its_seconds_are_added_up(
    case_payload, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("FAKE_CASES", "a,b,c,d,e")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    began = time.perf_counter()
    result = _run(tmp_path, monkeypatch, case_payload, levels=("interpreter",))
    whole = time.perf_counter() - began
    assert sorted(item["case"] for item in result.data["results"]) == [f"fake[{name}]" for name in "abcde"]
    level, op = result.data["seconds"]
    assert (level["level"], level["op"], op["op"]) == ("interpreter", None, "fake")
    assert 0 < level["seconds"] <= whole and level["seconds"] <= result.data["duration_s"] + 0.001
    assert level["seconds"] < op["seconds"] < 3 * level["seconds"]


def test_a_forced_card_gets_both_variables_and_an_sm8x_card_neither(
    case_payload: Path, monkeypatch: pytest.MonkeyPatch
):
    jobs = []
    monkeypatch.setattr(runner, "run_cases", lambda job, cases, crew: jobs.append(job) or [])
    for capability in ([9, 0], [8, 0]):
        gpu = H200 | {"capability": capability}
        monkeypatch.setattr(
            runner, "probe", lambda python, gpu=gpu: {"torch": "2", "triton": "3", "gpu": gpu}
        )
        verify.verify(_request(case_payload, Level.NUMERICS, arch="sm80"))
    forced = ("DEEPINFER_FORCE_ARCH", "TRITON_OVERRIDE_ARCH")
    assert [{name: job.env[name] for name in forced if name in job.env} for job in jobs] == [
        {"DEEPINFER_FORCE_ARCH": "sm80", "TRITON_OVERRIDE_ARCH": "sm80"},
        {},
    ]


# the command


def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path, **options):
    monkeypatch.setattr(command, "find_target", lambda where, out: None)
    monkeypatch.setattr(command, "payload_root", lambda target, out: root)
    return command.run(command.VerifyOptions(**options), Output())


@pytest.mark.kernels
def test_a_failure_is_shown_in_detail_with_the_command_that_runs_it_again(
    case_payload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FAKE_CASES", "good,wrong")
    output = tmp_path / "out.json"
    result = _run(tmp_path, monkeypatch, case_payload, levels=("interpreter",), output=output)
    text = capsys.readouterr().out
    assert result.exit_code == ExitCode.FAILED
    assert "interpreter\tfake\t1\t1\t0" in text
    assert "out: 1 of 8 elements not bit-exact" in text
    assert "first bad: out[3] is" in text
    assert "max abs 1.000e+00" in text and "matched ratio 0.875000" in text
    assert "run it again: deepinfer verify --level interpreter --case 'fake[wrong]'" in text
    assert "1 passed, 1 failed, 0 skipped" in text
    document = json.loads(output.read_text())
    assert (document["command"], document["exit_code"], document["status"]) == ("verify", 1, "partial")
    assert [row["status"] for row in document["data"]["results"]] == ["PASSED", "FAILED"]


def test_nothing_runnable_is_exit_3(case_payload, tmp_path, bare_python, monkeypatch, capsys):
    result = _run(tmp_path, monkeypatch, case_payload, where=TargetOptions(python=bare_python))
    assert (result.exit_code, result.errors[0].code) == (ExitCode.UNSUPPORTED, "nothing-runnable")
    assert "not run: numerics:" in capsys.readouterr().out


@pytest.mark.kernels
def test_a_level_asked_for_by_name_must_run(case_payload, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = _run(tmp_path, monkeypatch, case_payload, levels=("interpreter", "numerics"))
    assert result.exit_code == ExitCode.UNSUPPORTED
    assert "level numerics could not run" in result.errors[0].message


@pytest.mark.kernels
def test_skipped_cases_alone_prove_nothing(case_payload, tmp_path, monkeypatch, capsys):
    skipped = CaseResult("fake[a]", "fake", Level.NUMERICS, Status.SKIPPED, "too little memory")
    report = VerifyReport((skipped,), (), {"root": "", "digest": ""})
    monkeypatch.setattr(command.verify, "verify", lambda request, on_event: report)
    assert _run(tmp_path, monkeypatch, case_payload).exit_code == ExitCode.UNSUPPORTED


def test_a_level_asked_for_proves_nothing_by_skipped_cases(case_payload, tmp_path, monkeypatch, capsys):
    passed = CaseResult("fake[a]", "fake", Level.INTERPRETER, Status.PASSED)
    skipped = CaseResult("fake[a]", "fake", Level.NUMERICS, Status.SKIPPED, "too little memory")
    report = VerifyReport((passed, skipped), (), {"root": "", "digest": ""})
    monkeypatch.setattr(command.verify, "verify", lambda request, on_event: report)
    asked = _run(tmp_path, monkeypatch, case_payload, levels=("interpreter", "numerics"))
    assert (asked.exit_code, asked.errors[0].code) == (ExitCode.UNSUPPORTED, "nothing-runnable")
    assert _run(tmp_path, monkeypatch, case_payload).exit_code == ExitCode.OK


@pytest.mark.parametrize(
    "options",
    [{"levels": ("e2e",)}, {"suite": "huge"}, {"arch": "volta"}],
    ids=lambda options: next(iter(options)),
)
def test_unknown_choices_are_usage_errors(case_payload, tmp_path, monkeypatch, options):
    with pytest.raises(UsageError, match=r"is unknown|is not an architecture"):
        _run(tmp_path, monkeypatch, case_payload, **options)


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        pytest.param({"DEEPINFER_DISABLE_OPS": "gather,decod"}, "unknown ops: decod; known are .*gather", id="op"),
        pytest.param({"DEEPINFER_DISABLE_OPS": "mhc_post_with_sqrsum"}, "unknown ops: mhc_post_with", id="replaces-nothing"),
        pytest.param({"DEEPINFER_DISABLE": "maybe"}, "neither on", id="neither-on-nor-off"),
        pytest.param({"DEEPINFER_FORCE_ARCH": "sm90"}, "is unknown; known are sm80", id="architecture"),
    ],
)  # fmt: skip
def test_switches_that_vllm_would_stop_at_are_usage_errors(tmp_path, monkeypatch, variables, word):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command.verify, "verify", lambda request, on_event: pytest.fail("something ran"))
    with pytest.raises(UsageError, match=word) as caught:
        _run(tmp_path, monkeypatch, payload.bundled().root)
    assert caught.value.code == "switch-invalid" and "vLLM" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "variables",
    [
        {"DEEPINFER_DISABLE_OPS": " gather, combine,"},
        {"DEEPINFER_DISABLE": "1", "DEEPINFER_DISABLE_OPS": "decod", "DEEPINFER_FORCE_ARCH": "sm90"},
    ],
    ids=["known-ops", "not-read"],
)
def test_switches_that_mean_something_do_not_stop_verify(tmp_path, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    passed = CaseResult("gather[a]", "gather", Level.STATIC, Status.PASSED)
    report = VerifyReport((passed,), (), {"root": "", "digest": ""})
    monkeypatch.setattr(command.verify, "verify", lambda request, on_event: report)
    assert _run(tmp_path, monkeypatch, payload.bundled().root).exit_code == ExitCode.OK


def test_the_rerun_command_keeps_what_mattered():
    opts = command.VerifyOptions(
        TargetOptions(Path("/srv/my vllm")), suite="full", arch="sm80", max_smem=49152
    )
    result = CaseResult("gather[x]", "gather", Level.NUMERICS, Status.FAILED)
    assert verify_table.rerun(opts, result) == (
        "deepinfer verify --level numerics --case 'gather[x]' --suite full --arch sm80 --max-smem 49152 "
        "--target '/srv/my vllm'"
    )


def test_results_survive_json():
    result = CaseResult(
        "a[b]", "a", Level.NUMERICS, Status.FAILED, "why", 1.5, float("inf"), 0.5,
        FirstBad("out", (1, 2), "nan", "1.0"), 0.1, {"repeats": 20},
    )  # fmt: skip
    assert CaseResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_not_run_is_part_of_the_document(case_payload, tmp_path, bare_python, monkeypatch, capsys):
    result = _run(tmp_path, monkeypatch, case_payload, where=TargetOptions(python=bare_python))
    assert {item["level"].value for item in result.data["not_run"]} == {level.value for level in Level}
    assert all(item["how"] and item["reason"] for item in result.data["not_run"])
