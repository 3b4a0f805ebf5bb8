"""Real processes: several commands on one vLLM at the same time, and commands that are stopped at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.overlay.state import lock
from tests.cli.conftest import Cli, install_into
from tests.conftest import FakeVllm, snapshot


def test_a_held_lock_stops_writers_at_once_and_no_reader(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    before = fake.snapshot()
    with lock(fake.target().state_dir):
        for verb in ("install", "rollback"):
            arch = ["--arch", "sm80"] if verb == "install" else []
            run = cli(verb, "--target", fake.site, *arch, "--yes")
            assert run.code == 1
            assert "\nerror[lock-held]: " in run.err
            assert f"process {os.getpid()}" in run.err
        assert cli("status", "--target", fake.site).code == 0
        assert cli("install", "--target", fake.site, "--arch", "sm80", "--dry-run").code == 0
    assert fake.snapshot() == before


@pytest.mark.release
def test_of_several_installs_at_once_one_writes(real_release: Callable[..., Path]) -> None:
    site = real_release("0.33.0")
    command = [sys.executable, "-m", "deepinfer_cli", "install", "--target", site, "--arch", "sm80", "--yes"]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = [(*child.communicate(timeout=60), child.returncode) for child in children]
    for out, err, code in said:
        assert (code, "error[lock-held]" in err) in ((0, False), (1, True)), out + err
    assert sum("installed overlay" in out for out, _, _ in said) == 1
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout.startswith("already installed")


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_an_install_that_is_stopped_at_any_moment_is_taken_back(
    cli: Cli, real_release: Callable[..., Path], number: signal.Signals
) -> None:
    site = real_release("0.30.0")
    start = snapshot(site)
    command = [sys.executable, "-m", "deepinfer_cli", "install", "--target", site, "--arch", "sm80", "--yes"]
    began = time.monotonic()
    subprocess.run([*command, "--no-verify"], capture_output=True, check=True)
    whole = time.monotonic() - began
    ends = set()
    for part in (0.5, 0.65, 0.75, 0.85, 0.95):
        back = cli("rollback", "--target", site, "--yes")
        assert back.code == 0, back.err
        assert snapshot(site) == start
        with subprocess.Popen(
            [*command, "--no-verify"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            time.sleep(part * whole)
            child.send_signal(number)
            child.communicate(timeout=60)
        ends.add(child.returncode)
        state = cli("status", "--target", site, "--json").document["data"]["state"]
        assert state in {"installed", "not-installed"} | (
            {"interrupted"} if number == signal.SIGKILL else set()
        )
        if state == "not-installed" and number != signal.SIGKILL:
            assert snapshot(site) == start
    assert ends <= {0, 130, -number}
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert cli("rollback", "--target", site, "--yes").code == 0
    assert snapshot(site) == start
