"""Keeps one command and ends everything it started, whatever becomes of the process that asked for it.

    python -I guard.py GRACE_S COMMAND...

Standard library only. The command runs in a session of its own; its output goes to this process's stderr. One JSON
event per line on stdout: `started` (its pid), `failed` (it cannot be started), `ended` (its exit code; whether it was
ended here; how many processes had to be killed). It ends when stdin does, which is also what a killed parent leaves:
SIGTERM to the command, and after GRACE_S seconds, at SIGUSR1, or when the command is gone, SIGKILL to all its descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROC = Path("/proc")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
_POLL_S = 0.05
_LAST_S = 10.0


def main() -> int:
    """Runs the command to its end; 0 unless it could not be started."""
    grace, command = float(sys.argv[1]), sys.argv[2:]
    _adopt_orphans()
    stop, hurry = threading.Event(), threading.Event()

    def at_once(*_: object) -> None:
        hurry.set()
        stop.set()

    signal.signal(signal.SIGUSR1, at_once)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True
        )
    except OSError as error:
        _say(event="failed", reason=f"{command[0]}: {error.strerror or error}")
        return 1
    _say(event="started", pid=child.pid)
    threading.Thread(target=_wait_for_end_of_stdin, args=(stop,), daemon=True).start()
    while child.poll() is None and not stop.wait(_POLL_S):
        pass
    stopped = child.poll() is None
    killed = end(child, grace, hurry)
    _say(event="ended", code=child.returncode, stopped=stopped, killed=killed)
    return 0


def end(child: subprocess.Popen[bytes], grace: float, hurry: threading.Event) -> int:
    """Ends the command and all its descendants, without grace once `hurry` is set; how many it took SIGKILL for."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            child.terminate()
        patience = time.monotonic() + grace
        while child.poll() is None and time.monotonic() < patience and not hurry.wait(_POLL_S):
            pass
    killed: set[int] = set()
    until = time.monotonic() + _LAST_S
    while (left := _descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(_POLL_S)
        _reap(child)
    if not (PROC / "self" / "stat").exists():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_LAST_S)
    return len(killed)


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants that lose theirs: none can get out of sight."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _descendants(pid: int) -> list[int]:
    """The living processes below `pid`."""
    parents = {}
    for folder in PROC.iterdir() if PROC.is_dir() else ():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # the name in the second field may hold spaces and parentheses
                state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(folder.name)] = int(parent)
    found, line = [], [pid]
    while line:
        above = line.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found += below
        line += below
    return found


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Collects adopted processes that have ended; the command's own end is `child`'s."""
    child.poll()
    if child.returncode is None:
        return
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _wait_for_end_of_stdin(stop: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    stop.set()


def _say(**event: Any) -> None:
    # whoever listened may be gone
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps(event) + "\n").encode())


if __name__ == "__main__":
    raise SystemExit(main())
