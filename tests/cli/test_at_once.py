"""Two commands on one vLLM at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.overlay.state import lock
from tests.cli.conftest import Cli, install_into
from tests.conftest import FakeVllm


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
