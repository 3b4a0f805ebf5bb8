"""Starts commands under the guard, and ends them for certain."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from deepinfer_cli.errors import FailedError, UsageError
from deepinfer_cli.validate import runner
from deepinfer_cli.validate.serving import guard

GUARD = Path(guard.__file__)
HOST = "127.0.0.1"
# what the guard takes beside the grace: killing, and looking until nothing is left
_GUARD_S = 25.0


class Guarded:
    """A command under the guard.

    Args:
        command: what to run.
        log: gets the command's output.
        env: all of its variables.
        cwd: its folder.
        grace_s: how long it may take to end by itself.

    Raises:
        FailedError: it cannot be started (`server-failed`).
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        grace_s: float = 30.0,
    ) -> None:
        self.log = log
        self.grace_s = grace_s
        self.pid: int | None = None
        self._ended: dict[str, Any] | None = None
        self._said = threading.Event()
        with log.open("ab") as stream:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), f"{grace_s:g}", *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, env=dict(env), cwd=cwd,
                start_new_session=True,
            )  # fmt: skip
        assert self._guard.stdout is not None
        self._listener = threading.Thread(target=self._listen, args=(self._guard.stdout,), daemon=True)
        self._listener.start()
        try:
            self._said.wait(timeout=30.0)
        except BaseException:
            # nobody else knows of it yet
            self.stop()
            raise
        if self.pid is None:
            reason = self._ended["reason"] if self._ended else "its guard, which does not answer"
            self.stop()
            raise FailedError(f"cannot start {reason}", code="server-failed", paths=(log,))

    def _listen(self, stream: IO[bytes]) -> None:
        for line in stream:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["event"] == "started":
                    self.pid = int(event["pid"])
                else:
                    self._ended = event
                self._said.set()
        self._said.set()

    def ended(self) -> str | None:
        """None while it runs, else how it ended, in words."""
        if self._ended is None and self._guard.poll() is None:
            return None
        self._listener.join(timeout=5.0)
        if self._ended is None:
            return "lost its guard"
        code = self._ended.get("code")
        return runner.exit_words(code) if isinstance(code, int) else "did not end"

    def ask(self) -> None:
        """Begins to end it, and does not wait."""
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()

    def hurry(self) -> None:
        """Ends it without its grace; does not wait, and is fit for a signal's handler."""
        self._guard.send_signal(signal.SIGUSR1)

    def stop(self) -> list[int]:
        """Ends it and everything it started; twice is fine.

        Returns:
            Processes of its session that are still there: none, unless the kernel holds them.
        """
        self.ask()
        try:
            self._guard.wait(timeout=self.grace_s + _GUARD_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self._listener.join(timeout=5.0)
        return end_session(self.pid) if self.pid is not None else []


def end_session(leader: int, patience_s: float = 10.0) -> list[int]:
    """Kills what is left of a session, and gives the processes that stay nevertheless."""
    until = time.monotonic() + patience_s
    while (left := in_session(leader)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return left


def in_session(leader: int, proc: Path = guard.PROC) -> list[int]:
    """The living processes of the session that process `leader` began; Linux only, elsewhere none."""
    found = []
    for folder in proc.iterdir() if proc.is_dir() else ():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX" and int(fields[3]) == leader:
                    found.append(int(folder.name))
    return sorted(found)


def free_ports(count: int, first: int | None) -> list[int]:
    """Ports that nothing listens on.

    Args:
        first: the user's choice: this one, and those after it.

    Raises:
        UsageError: one of the user's is taken (`port-in-use`).
    """
    if first is not None:
        wanted = list(range(first, first + count))
        for port in wanted:
            _require_free(port)
        return wanted
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _require_free(port: int) -> None:
    with socket.socket() as one:
        # as the server does: what a closed server leaves in TIME_WAIT is no obstacle
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except (OSError, OverflowError) as error:
            taken = getattr(error, "errno", None) == errno.EADDRINUSE
            why = "is in use" if taken else f"cannot be used: {error}"
            raise UsageError(
                f"port {port} {why}",
                code="port-in-use",
                hint="name another with --port, or leave it out: a free one is found",
            ) from None


def tail(log: Path, count: int) -> list[str]:
    """The last lines of a log that is still written."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 200 * count - 4_000))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip()[:400] for line in text.splitlines() if line.strip()][-count:]


def following(path: Path) -> Iterator[str]:
    """Lines that another process appends to `path`, as they come; an empty string where there is none yet."""
    with path.open("rb") as stream:
        part = b""
        while True:
            part += stream.readline()
            if part.endswith(b"\n"):
                yield part.decode(errors="replace")
                part = b""
            else:
                yield ""
