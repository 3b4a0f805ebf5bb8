"""`deepinfer bench --serving` as a process: what it prints and writes, and what signals leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_cli.overlay import payload
from deepinfer_cli.validate import results
from deepinfer_cli.validate.serving import api
from tests.serving import site

ROOT = Path(__file__).parents[2]
QUICK = ("--input-tokens", "40", "--streams", "1", "--output-tokens", "4", "--runs", "2")


@pytest.fixture
def target(tmp_path):
    """A stand-in vLLM with V4.1's folder and the overlay in it."""
    folder = site.make(tmp_path / "site")
    (folder / "vllm" / "models" / "deepseek_v41").mkdir(parents=True)
    (folder / "vllm" / "models" / "deepseek_v41" / "__init__.py").touch()
    shutil.copytree(payload.bundled().root, folder / "vllm" / payload.PACKAGE)
    return folder


@pytest.fixture
def start(target, tmp_path):
    """Starts `deepinfer bench --serving …` and ends it with the test."""
    running = []

    def make(*words, **env):
        where = ["--target", str(target), "--python", sys.executable, "--logs", str(tmp_path / "logs")]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.run_cli", "bench", "--serving", *where, *words], cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env, start_new_session=True,
        )  # fmt: skip
        running.append(process)
        return process

    yield make
    for process in running:
        process.kill()
        process.communicate()


def wait_for_lines(path: Path, count: int) -> None:
    until = time.monotonic() + 30.0
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < until, "the servers did not start"
        time.sleep(0.05)


def test_a_whole_comparison(start, tmp_path, nothing_left):
    output = tmp_path / "serving.json"
    process = start(
        "--model", "some/model", *QUICK, "--together", "-o", str(output), "--", "--block-size", "128"
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert nothing_left() == 4
    assert "both servers run at once, and their runs alternate" in err
    assert "cold prefill, 40 tokens\tprefill, tokens/s\t" in out
    assert "live, 6 ops bound / live, " in out
    assert "the scored text differs by" in out
    document = results.read(output)
    assert document["serving"]["order"] == "together"
    assert document["serving"]["serve_arguments"] == ["--block-size", "128"]
    for server in document["serving"]["servers"]:
        assert server["command"][-2:] == ["--block-size", "128"]
        assert server["overlay"]["state"] == "live"
        assert ("combine" in server["switched_off"]) == (server["name"] == "enable-only")
    assert all("ratio" not in json.dumps(row) for row in document["rows"])
    assert {row["status"] for row in document["rows"]} == {"PASSED"}
    assert document["environment"]["gpu"] == "NVIDIA A100"


def test_the_small_model_in_prepared_processes(start, tmp_path, nothing_left):
    process = start("--small", *QUICK, "--together", "--arch", "sm80", FAKE_GPU="h200")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "NVIDIA H200: sm80 code, forced" in err
    assert nothing_left() == 4
    for side in ("overlay", "enable-only"):
        log = (tmp_path / "logs" / side / "server.log").read_text()
        # the server itself, and a process that it spawned
        assert f"prepared: {json.dumps([[['deepinfer_small'], [8, 0]]] * 2)}" in log
        assert "sm80 (forced); bound" in log
    assert "decode, 1 stream, 4 tokens, random prompts" in out


def test_a_newer_card_needs_an_arch(start):
    process = start("--small", *QUICK, FAKE_GPU="h200")
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "error[nothing-runnable]" in err and "--arch sm80" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(start, tmp_path, nothing_left, number):
    output = tmp_path / "part.json"
    process = start("--model", "m", *QUICK, "--together", "-o", str(output), FAKE_CLIENT="hang:5")
    events = tmp_path / "logs" / "client" / "events-0-1.json"
    # hello; four runs begin and end; the fifth begins
    wait_for_lines(events, 10)
    time.sleep(1.0)  # until they have been read
    process.send_signal(number)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "error[interrupted]: interrupted; nothing of it runs any more" in err
    assert str(tmp_path / "logs") in err
    assert nothing_left() == 4
    # what was measured until then
    kept = results.read(output)["rows"]
    assert [len(row["runs"]) for row in kept] == [1, 1]


def test_an_interruption_while_a_server_starts(start, tmp_path, nothing_left):
    process = start("--model", "m", *QUICK, FAKE_SERVER="hang")
    wait_for_lines(tmp_path / "pids", 2)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert nothing_left() == 2


def read_until(process, text):
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"{text} was not said")


def test_a_second_interruption_does_not_wait_for_a_deaf_server(start, tmp_path, nothing_left):
    process = start("--model", "m", *QUICK, "--together", FAKE_SERVER="deaf", FAKE_CLIENT="hang:1")
    wait_for_lines(tmp_path / "logs" / "client" / "events-0-1.json", 2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    read_until(process, "enable-only: stopping, up to 30 s; Ctrl-C now kills it at once")
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20.0
    assert process.returncode == 130
    assert "error[interrupted]: interrupted; nothing of it runs any more" in err
    assert nothing_left() == 4


def test_an_interruption_while_a_server_stops_ends_the_measurement(start, tmp_path, nothing_left):
    output = tmp_path / "part.json"
    process = start("--model", "m", *QUICK, "-o", str(output), FAKE_SERVER="deaf")
    read_until(process, "overlay: stopping, up to 30 s")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20.0
    assert (process.returncode, "nothing of it runs any more" in err) == (130, True), err
    assert nothing_left() == 2
    assert results.read(output)["rows"]


def test_a_killed_deepinfer_leaves_nothing(start, tmp_path, nothing_left):
    process = start("--model", "m", *QUICK, "--together", FAKE_CLIENT="hang:1")
    wait_for_lines(tmp_path / "pids", 4)
    process.kill()
    process.communicate(timeout=60)
    assert nothing_left() == 4


def test_a_server_that_fails_shows_the_end_of_its_log(start, tmp_path, nothing_left):
    process = start("--model", "m", *QUICK, "--json", FAKE_SERVER="fail")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    (error,) = json.loads(out)["errors"]
    assert error["code"] == "server-failed" and "Free memory on device" in error["message"]
    assert "warning: log | " in err and "ValueError: Free memory" in err
    assert nothing_left() == 2


def test_an_overlay_that_was_not_live_fails_the_comparison(start, nothing_left):
    process = start("--model", "m", *QUICK, FAKE_SERVER="silent")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error[overlay-not-live]: overlay: the overlay was off" in err
    assert "off / off" in out
    nothing_left()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is nothing to serve"),
        (["--model", "m", "--small"], "--model and --small do not go together"),
        (["--endpoint", "http://a"], "--endpoint is needed twice"),
        (["--endpoint", "http://a", "--endpoint", "http://b", "--together"], "--together is for servers"),
        (["--model", "m", "--together", "--rounds", "2"], "--rounds is for servers that take turns"),
        (["--model", "m", "--rounds", "4"], "--rounds 4 needs as many runs"),
        (["--model", "m", "--", "--port", "8000"], "--port is not yours to give"),
        (["--model", "m", "--output-tokens", "2000"], "is more than vLLM's loader lets through"),
        (["--small", "--input-tokens", "70000"], "the small model has"),
        (["--model", "m", "--text", "gone.txt"], "the text cannot be read"),
        (["--model", "m", "--prompts", "gone.jsonl"], "the prompts cannot be read"),
        (["--model", "m", "--max-smem", "1"], "--max-smem does not go with --serving"),
        (["--endpoint", "foo", "--endpoint", "http://b"], "--endpoint foo is no address of a server"),
        (["--endpoint", "http://a", "--endpoint", "http://b:9 9"], "--endpoint http://b:9 9 is no address"),
        (["--endpoint", "http://a:99999", "--endpoint", "http://b"], "http://a:99999 is no address"),
        (["--endpoint", "http://A:1/v1/", "--endpoint", "http://a:1"], "both --endpoint name http://a:1"),
        (["--model", "m", "--input-tokens", "x"], "'--input-tokens': 'x' is no list of numbers"),
        (["--model", "m", "--input-tokens", "0"], "'--input-tokens': '0' is no list of numbers"),
        (["--model", "m", "--streams", "-1"], "'--streams': '-1' is no list of numbers"),
        (
            ["--model", "m", "--", "--block-size", "64"],
            "--block-size 64 goes wrong with DeepSeek-V4.1 on SM8x",
        ),
        (["--small", "--", "--block-size=64"], "--block-size 64 goes wrong"),
        (["--model", "m", "--", "-tp", "3"], "--tensor-parallel-size 3 goes wrong"),
        (["--model", "m", "--arch", "sm86"], "runs its own code"),
    ],
)
def test_what_does_not_go_together(target, capsys, monkeypatch, words, said):
    from deepinfer_cli import app
    from tests.serving import run_cli

    monkeypatch.setattr(
        run_cli.runner,
        "probe",
        lambda *_: {"torch": "1", "triton": "1", "gpu": run_cli.A100},
    )
    at = words.index("--") if "--" in words else len(words)
    code = app.main(
        ["bench", "--serving", *words[:at], "--target", str(target), "--python", sys.executable, *words[at:]]
    )
    assert code == (3 if "--arch" in words else 2)
    err = capsys.readouterr().err
    assert said in err and "\nhint: " in err


def test_its_options_mean_nothing_without_it(capsys):
    from deepinfer_cli import app

    for words in (
        ["--small"],
        ["--model", "m"],
        ["--endpoint", "u"],
        ["--start-timeout", "5"],
        ["--rounds", "2"],
    ):
        assert app.main(["bench", *words]) == 2
        assert f"{words[0]} goes with --serving" in capsys.readouterr().err


@pytest.fixture
def endpoints(target, tmp_path):
    """Two running stand-in servers, the second without `combine`."""
    from deepinfer_cli.validate.serving import process

    running, urls = [], []
    for port, off in zip(process.free_ports(2, None), ("", "combine"), strict=True):
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "m"]
        env = os.environ | {"PYTHONPATH": str(target), "DEEPINFER_DISABLE_OPS": off}
        words = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
        (tmp_path / f"cwd-{port}").mkdir()
        running.append(
            process.Guarded([*command, *words], tmp_path / f"log-{port}", env, tmp_path / f"cwd-{port}", 1.0)
        )
        urls.append(f"http://127.0.0.1:{port}")
    wait_for_lines(tmp_path / "pids", 4)
    yield urls
    for one in running:
        one.stop()


def test_two_running_servers(start, endpoints, tmp_path):
    first, second = endpoints
    output = tmp_path / "endpoints.json"
    process = start("--endpoint", first, "--endpoint", f"{second}/v1/", *QUICK, "-o", str(output))
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    document = results.read(output)
    assert document["serving"]["order"] == "endpoints" and document["serving"]["endpoints"] == endpoints
    for row in document["rows"]:
        assert all(one["state"] == "unknown" for one in row["overlay"].values())
    fast, slow = (row for row in document["rows"] if row["workload"] == "prefill")
    assert (fast["provider"], slow["provider"]) == ("endpoint-a", "endpoint-b")
    assert fast["metrics"]["ttft_s"]["p50"] < slow["metrics"]["ttft_s"]["p50"]
    # they are not ours to end
    assert all(api.get(f"{url}/health", 5.0) == b"{}" for url in endpoints)


def test_an_endpoint_that_is_none(start, endpoints, tmp_path):
    url = "http://127.0.0.1:9"
    process = start("--endpoint", endpoints[0], "--endpoint", url, *QUICK)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"error[endpoint-failed]: {url} is no server that serves a model" in err
    assert not (tmp_path / "logs").exists()


def test_a_port_in_use_leaves_no_folder(start, tmp_path, nothing_left):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--model", "m", *QUICK, "--port", str(taken.getsockname()[1]))
        _out, err = process.communicate(timeout=60)
    assert (process.returncode, "error[port-in-use]" in err) == (2, True), err
    assert not (tmp_path / "logs").exists()
    assert nothing_left() == 0


@pytest.mark.parametrize("there", [True, False])
def test_what_fails_before_anything_starts_leaves_the_folder_as_it_was(
    target, tmp_path, capsys, monkeypatch, there
):
    """Such as a port that is taken between the first look and the server's start."""
    from deepinfer_cli import app
    from deepinfer_cli.errors import UsageError
    from deepinfer_cli.validate.serving import drive
    from tests.serving import run_cli

    def taken(*_):
        raise UsageError("port 1 is in use", code="port-in-use")

    monkeypatch.setattr(
        run_cli.runner, "probe", lambda *_: {"torch": "1", "triton": "1", "gpu": run_cli.A100}
    )
    monkeypatch.setattr(drive, "free_ports", taken)
    logs = tmp_path / "logs"
    if there:
        logs.mkdir()
    words = ["--model", "m", "--target", str(target), "--python", sys.executable, "--logs", str(logs)]
    assert app.main(["bench", "--serving", *words]) == 2
    assert "error[port-in-use]" in capsys.readouterr().err
    assert logs.exists() == there and not (there and any(logs.iterdir()))


def test_a_dubious_setting_is_a_warning_alone(start):
    process = start("--model", "m", *QUICK, "--", "--enforce-eager", FAKE_SERVER="fail")
    _out, err = process.communicate(timeout=60)
    assert "warning: --enforce-eager: no CUDA graphs" in err
    assert "error[server-failed]" in err
