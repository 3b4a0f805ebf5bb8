"""Two stand-in servers under the whole measurement, with real processes: what it shows, and what it leaves."""

from __future__ import annotations

import socket

import pytest

from deepinfer_cli.errors import FailedError, UsageError
from deepinfer_cli.validate.serving import bench, document, drive, plan, rows
from deepinfer_cli.validate.serving.server import ServerError
from tests.serving.conftest import OFF


def measure(request, tmp_path, said=None):
    work = drive.Drive(request, tmp_path / "logs", (said if said is not None else []).append)
    return work.run()


def of(found, workload, provider):
    return [row for row in found if (row["workload"], row["provider"]) == (workload, provider)]


def test_both_servers_one_after_the_other(request_of, tmp_path, nothing_left):
    request = request_of()
    measured = measure(request, tmp_path)
    found = document.result_rows(request, measured)
    assert nothing_left() == 4
    assert [row["status"] for row in found] == ["PASSED"] * len(found)
    (fast,), (slow,) = of(found, plan.PREFILL, "overlay"), of(found, plan.PREFILL, "enable-only")
    assert len(fast["runs"]) == 2 and fast["codegen"] == "native"
    assert [run["seed"] for run in fast["runs"]] == [run["seed"] for run in slow["runs"]]
    assert len({run["seed"] for run in fast["runs"]}) == 2
    assert fast["overlay"]["overlay"]["state"] == "live" and fast["overlay"]["overlay"]["off"] == []
    assert slow["overlay"]["enable-only"]["off"] == sorted(OFF)
    assert "combine" not in slow["overlay"]["enable-only"]["bound"]
    # the stand-in takes 20 ms longer without `combine`
    assert rows.ratio(found, fast, "ttft_s") > 1.3
    decode = of(found, plan.DECODE, "overlay")
    assert [row["case"]["streams"] for row in decode] == [1, 2]
    assert decode[0]["metrics"]["acceptance_length"]["p50"] == 3.0
    assert document.misled(request, measured) == []
    assert [server["kv_tokens"] for server in measured.servers] == [123_456] * 2


def test_the_scored_text_against_its_noise(request_of, tmp_path):
    request = request_of(repeats=3, streams=(1,))
    found = document.result_rows(request, measure(request, tmp_path))
    (both,) = of(found, rows.DIFFERENCE, "overlay against enable-only")
    (own,) = of(found, rows.DIFFERENCE, "overlay against itself")
    assert both["metrics"]["rms"]["p50"] == pytest.approx(1e-3, rel=0.2)
    assert both["metrics"]["mean"]["p50"] == pytest.approx(-1e-3, rel=0.2)  # the overlay's is less
    assert 0 < own["metrics"]["rms"]["max"] < 1e-4
    assert len(both["runs"]) == 9 and len(own["runs"]) == 3
    assert both["case"]["tokens"] == 2_048 and both["case"]["pieces"] == 2
    assert set(both["overlay"]) == {"overlay", "enable-only"}


def test_both_at_once_alternate(request_of, tmp_path, nothing_left):
    said: list[str] = []
    request = request_of(together=True, streams=(1,))
    measured = measure(request, tmp_path, said)
    order = [(one.bench.workload.kind, one.bench.repeat, one.bench.side.name) for one in measured.outcomes]
    assert order[:4] == [
        ("prefill", 0, "overlay"), ("prefill", 0, "enable-only"), ("prefill", 1, "enable-only"), ("prefill", 1, "overlay"),
    ]  # fmt: skip
    assert nothing_left() == 4
    assert "--gpu-memory-utilization" in measured.servers[0]["command"]
    assert any("overlay: answers after" in line for line in said)


def test_rounds_start_the_servers_in_turn(request_of, tmp_path, nothing_left):
    request = request_of(rounds=2, streams=(1,))
    measured = measure(request, tmp_path)
    # A, then B for two rounds, then A again
    assert [server["name"] for server in measured.servers] == ["overlay", "enable-only", "overlay"]
    assert nothing_left() == 6
    logs = {server["log"] for server in measured.servers}
    assert logs == {"overlay/server.log", "enable-only/server.log", "overlay/server-2.log"}
    assert measured.servers[0]["command"][:3] == ["vllm", "serve", "some/model"]
    found = document.result_rows(request, measured)
    assert {len(row["runs"]) for row in found if row["workload"] == plan.PREFILL} == {2}
    assert found[0]["overlay"]["overlay"]["state"] == "live"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fail", "did not start: it ended with exit code 1: ValueError: Free memory on device"),
        ("hang", "did not answer within 2 s"),
        ("other-name", "another server answers on port"),
    ],
)
def test_a_server_that_does_not_come_up(request_of, tmp_path, nothing_left, monkeypatch, fault, words):
    monkeypatch.setenv("FAKE_SERVER", fault)
    with pytest.raises(ServerError, match=words) as caught:
        measure(request_of(start_timeout_s=2.0), tmp_path)
    assert caught.value.code == "server-failed" and caught.value.paths
    assert any("Initializing" in line or "ValueError" in line for line in caught.value.log_tail)
    assert nothing_left() == 2


def test_one_that_does_not_listen_to_sigterm_is_killed(request_of, tmp_path, nothing_left, monkeypatch):
    monkeypatch.setenv("FAKE_SERVER", "deaf")
    monkeypatch.setattr(drive.Server, "grace_s", 1.0)
    request = request_of(streams=(1,), repeats=1)
    assert measure(request, tmp_path).problem is None
    assert nothing_left() == 4


def test_a_server_that_dies_leaves_what_was_measured(request_of, tmp_path, nothing_left, monkeypatch):
    monkeypatch.setenv("FAKE_SERVER", "die:5")
    request = request_of()
    measured = measure(request, tmp_path)
    assert "the overlay server is gone: it ended with exit code 7" in measured.problem.message
    assert nothing_left() == 2
    found = document.result_rows(request, measured)
    assert found[0]["status"] == "PASSED" and len(found[0]["runs"]) == 2


def test_a_refused_request_fails_its_run_alone(request_of, tmp_path, nothing_left, monkeypatch):
    monkeypatch.setenv("FAKE_SERVER", "bad:2")
    request = request_of(streams=(1,))
    found = document.result_rows(request, measure(request, tmp_path))
    (row,) = of(found, plan.PREFILL, "overlay")
    assert row["status"] == "RUNTIME_ERROR" and "400" in row["reason"]
    assert [run["status"] for run in row["runs"]] == ["RUNTIME_ERROR", "PASSED"]
    assert of(found, plan.DECODE, "overlay")[0]["status"] == "PASSED"


def test_a_killed_client_loses_one_run(request_of, tmp_path, nothing_left, monkeypatch):
    monkeypatch.setenv("FAKE_CLIENT", "kill:2")
    monkeypatch.setenv("FAKE_ONCE", str(tmp_path / "once"))
    request = request_of(streams=(1,))
    found = document.result_rows(request, measure(request, tmp_path))
    (row,) = of(found, plan.PREFILL, "overlay")
    assert [run["status"] for run in row["runs"]] == ["RUNTIME_ERROR", "PASSED"]
    assert row["reason"] == "the client was killed by SIGKILL"
    assert all(one["status"] == "PASSED" for one in found if one is not row)
    assert nothing_left() == 4


def test_a_run_that_hangs_is_ended(request_of, tmp_path, nothing_left, monkeypatch):
    monkeypatch.setenv("FAKE_CLIENT", "hang:2")
    monkeypatch.setenv("FAKE_ONCE", str(tmp_path / "once"))
    request = request_of(streams=(1,), run_timeout_s=2.0)
    (row,) = of(document.result_rows(request, measure(request, tmp_path)), plan.PREFILL, "overlay")
    assert row["reason"] == "not done within 2 s"
    assert nothing_left() == 4


def test_a_client_without_its_packages_says_so(request_of, tmp_path, nothing_left, monkeypatch):
    monkeypatch.setenv("FAKE_CLIENT", "import")
    with pytest.raises(FailedError, match="No module named 'aiohttp'") as caught:
        measure(request_of(), tmp_path)
    assert caught.value.code == "client-failed"
    assert nothing_left() == 2


def test_a_warm_prompt_is_no_cold_prefill(request_of, tmp_path, monkeypatch):
    # the same prompt in every run: the stand-in's prefix cache has it from the second on
    request = request_of(streams=(1,))
    monkeypatch.setattr(
        drive, "benches",
        lambda *given: [plan.Bench(one.id, one.side, one.workload, one.repeat, 1) for one in plan.benches(*given)],
    )  # fmt: skip
    (row,) = of(document.result_rows(request, measure(request, tmp_path)), plan.PREFILL, "overlay")
    assert row["status"] == "FAILED" and "not cold: 64 tokens came from the prefix cache" in row["reason"]


def test_an_overlay_that_says_nothing_is_not_live(request_of, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SERVER", "silent")
    request = request_of(streams=(1,), repeats=1)
    measured = measure(request, tmp_path)
    assert any("overlay: the overlay was off" in text for text in document.misled(request, measured))


def test_prompts_of_one_s_own(request_of, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "go on"}\n{"prompt": "and on"}\n')
    request = request_of(prompts=own, streams=(2,), repeats=1)
    found = document.result_rows(request, measure(request, tmp_path))
    (row,) = of(found, plan.DECODE, "overlay")
    assert (row["case"]["prompts"], row["status"]) == ("custom", "PASSED")
    assert row["runs"][0]["input_tokens"] == 4


def test_a_port_in_use(request_of, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="is in use") as caught:
            measure(request_of(port=taken.getsockname()[1]), tmp_path)
    assert caught.value.code == "port-in-use"
    assert not (tmp_path / "pids").exists()


def test_a_port_that_is_taken_meanwhile_leaves_what_was_measured(request_of, tmp_path, monkeypatch):
    ports, calls = drive.free_ports, []

    def taken(count, first):
        calls.append(count)
        if len(calls) == 2:
            raise UsageError("port 1 is in use", code="port-in-use")
        return ports(count, first)

    monkeypatch.setattr(drive, "free_ports", taken)
    request = request_of(streams=(1,), repeats=1)
    measured = measure(request, tmp_path)
    assert measured.problem.code == "port-in-use"
    assert document.result_rows(request, measured)[0]["status"] == "PASSED"


def test_a_text_of_one_token_is_not_scored(request_of, tmp_path):
    request = request_of(streams=(1,), repeats=1)
    request.text.write_text("one")
    measured = measure(request, tmp_path)
    assert "no second token" in measured.problem.message and measured.outcomes


def test_the_small_model_is_written_and_its_processes_prepared(request_of, tmp_path):
    request = request_of(small=True, model=None, text=None, input_lengths=(40,), streams=(1,), repeats=1)
    folder = tmp_path / "one"
    folder.mkdir()
    from deepinfer_cli.validate.serving import arguments

    command = arguments.serve_command(request, request.sides[0], 8_000, folder)
    assert command[1].endswith("launch.py") and (folder / "model" / "tokenizer.json").is_file()
    assert command[command.index("--load-format") + 1] == "deepinfer_small"
    assert "--skip-tokenizer-init" not in command


def test_what_is_left_of_a_client_is_said(request_of, tmp_path, monkeypatch):
    class Stuck(bench.Guarded):
        def stop(self):
            return [*super().stop(), 4_242]

    monkeypatch.setattr(bench, "Guarded", Stuck)
    assert measure(request_of(streams=(1,), repeats=1, together=True), tmp_path).left == [4_242]
    monkeypatch.setenv("FAKE_CLIENT", "import")
    work = drive.Drive(request_of(), tmp_path / "failed", str)
    with pytest.raises(FailedError):
        work.run()
    assert work.measured.left == [4_242]
