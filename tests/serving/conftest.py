"""Two stand-in servers, and the processes that they leave."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.validate.serving import plan
from tests.serving import site

OFF = ("combine", "ragged")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the shell that runs the tests decides how a server starts."""
    for name in list(os.environ):
        if name.startswith(("DEEPINFER_", "FAKE_", "VLLM_", "OPENAI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., plan.Request]:
    """A small measurement on the stand-in: `request_of(repeats=2)`."""

    def make(**more: object) -> plan.Request:
        parent = site.make(tmp_path / "site")
        sides = (plan.Side(plan.OVERLAY), plan.Side(plan.ENABLE_ONLY, OFF))
        given = {
            "model": "some/model", "input_lengths": (40,), "streams": (1, 2), "output_tokens": 4, "repeats": 2,
            "start_timeout_s": 30.0, "run_timeout_s": 20.0, "arch": "sm80", "text": tmp_path / "text.txt",
        } | more  # fmt: skip
        (tmp_path / "text.txt").write_text("one two three four five six " * 400)
        return plan.Request(Path(sys.executable), parent, sides, **given)  # type: ignore[arg-type]

    return make


@pytest.fixture
def nothing_left(tmp_path: Path) -> Callable[[], int]:
    """Fails where a process of a stand-in server or client still runs; how many there were of the servers."""

    def look() -> int:
        pids, clients = (
            [int(line) for line in path.read_text().split()] if path.exists() else []
            for path in (tmp_path / "pids", tmp_path / "pids-client")
        )
        until = time.monotonic() + 5.0
        while (left := [pid for pid in pids + clients if runs(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left, f"still running: {left}"
        return len(pids)

    return look


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
