"""The guard with real processes: nothing that a command started outlives it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from deepinfer_cli.errors import FailedError, UsageError
from deepinfer_cli.validate.serving import process
from tests.serving.conftest import runs

# a child in a session of its own whose parent is gone: only whoever adopts orphans finds it
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
    time.sleep(600)
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def guarded(tmp_path):
    """`guarded(code, argument)` → a process under the guard, stopped with the test."""
    started = []

    def start(code, *words, grace_s=5.0):
        one = process.Guarded(
            [sys.executable, "-c", code, *words], tmp_path / "log", os.environ, tmp_path, grace_s
        )
        started.append(one)
        return one

    yield start
    for one in started:
        one.stop()


def pids_in(path, count):
    until = time.monotonic() + 20.0
    while not path.exists() or len(path.read_text().split()) < count:
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int(line) for line in path.read_text().split()]


def all_gone(pids):
    until = time.monotonic() + 5.0
    while any(map(runs, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(runs, pids))


def test_an_interruption_while_it_starts_leaves_nothing(guarded, tmp_path, monkeypatch):
    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            pids_in(tmp_path / "pids", 2)
            raise KeyboardInterrupt

    monkeypatch.setattr(process, "threading", SimpleNamespace(Event=Interrupted, Thread=threading.Thread))
    with pytest.raises(KeyboardInterrupt) as caught:
        guarded(DAEMON, str(tmp_path / "pids"), "600")
    # the traceback holds what was begun, so that nothing else ends it
    assert caught.traceback
    assert all_gone(pids_in(tmp_path / "pids", 2))


def test_a_daemon_of_the_command_ends_with_it(guarded, tmp_path):
    one = guarded(DAEMON, str(tmp_path / "pids"), "600")
    pids = pids_in(tmp_path / "pids", 2)
    assert one.ended() is None and all(map(runs, pids))
    assert one.stop() == []
    assert all_gone(pids)
    assert one.stop() == []


def test_a_daemon_is_ended_when_the_command_ends_by_itself(guarded, tmp_path):
    one = guarded(DAEMON, str(tmp_path / "pids"), "0.5")
    pids = pids_in(tmp_path / "pids", 2)
    assert all_gone(pids)
    until = time.monotonic() + 5.0
    while one.ended() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert one.ended() == "ended with exit code 0"


def test_a_killed_guard_is_noticed_and_its_command_ended(guarded, tmp_path):
    one = guarded("import time; print('here', flush=True); time.sleep(600)")
    os.kill(one._guard.pid, signal.SIGKILL)
    until = time.monotonic() + 5.0
    while one.ended() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert one.ended() == "lost its guard"
    assert runs(one.pid)
    assert one.stop() == []
    assert all_gone([one.pid])


def test_how_it_ended_and_what_it_printed(guarded, tmp_path):
    one = guarded(
        "import sys, os; print('out', flush=True); sys.stderr.write('err'); os.kill(os.getpid(), 9)"
    )
    until = time.monotonic() + 10.0
    while one.ended() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert one.ended() == "was killed by SIGKILL"
    assert (tmp_path / "log").read_text() == "out\nerr"


def test_sigterm_comes_before_sigkill(guarded, tmp_path):
    mark = tmp_path / "mark"
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n    open(sys.argv[1], 'w').write('asked'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nopen(sys.argv[2], 'w').write('0')\ntime.sleep(600)"
    )
    one = guarded(code, str(mark), str(tmp_path / "ready"))
    pids_in(tmp_path / "ready", 1)
    assert one.stop() == [] and mark.read_text() == "asked"
    assert one.ended() == "ended with exit code 0"


def test_in_a_hurry_it_has_no_grace(guarded, tmp_path):
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').write('0')\ntime.sleep(600)"
    )
    one = guarded(code, str(tmp_path / "ready"), grace_s=60.0)
    pids_in(tmp_path / "ready", 1)
    began = time.monotonic()
    one.ask()
    time.sleep(0.5)
    assert one.ended() is None
    one.hurry()
    assert one.stop() == [] and time.monotonic() - began < 20.0
    assert one.ended() == "was killed by SIGKILL"
    one.hurry()


def test_a_command_that_is_none(tmp_path):
    with pytest.raises(FailedError, match=r"cannot start .*nothing-here: No such file") as caught:
        process.Guarded([str(tmp_path / "nothing-here")], tmp_path / "log", os.environ, tmp_path)
    assert caught.value.code == "server-failed"


def test_ports():
    first, second = process.free_ports(2, None)
    assert first != second
    with socket.socket() as taken:
        taken.bind((process.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use"):
            process.free_ports(1, port)
        with pytest.raises(UsageError):
            process.free_ports(2, port - 1)
    assert process.free_ports(1, first) == [first]
    with pytest.raises(UsageError, match="cannot be used"):
        process.free_ports(2, 65_535)


def test_the_end_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert process.tail(log, 3) == []
    log.write_bytes(b"".join(b"line %d\n\n" % number for number in range(20_000)) + b"\xff half")
    assert process.tail(log, 2) == ["line 19999", "\ufffd half"]
