"""A `vllm serve` of ours: starting it, waiting for it, reading its log, ending it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer_cli.errors import FailedError
from deepinfer_cli.validate.serving import api, arguments, live
from deepinfer_cli.validate.serving.plan import Request, Side
from deepinfer_cli.validate.serving.process import HOST, Guarded, tail

LOG = "server.log"
TAIL_LINES = 15
_POLL_S = 0.2
_EVERY_S = 15.0
# the last line of a traceback, however the log prefixes it
_ERROR = re.compile(r"(?:^|[\])] ?|\s)((?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit): .+)$")

Say = Callable[[str], None]


class ServerError(FailedError):
    """A server of ours did not come up, or went away; `log_tail` has its last lines."""

    def __init__(self, message: str, log: Path, code: str = "server-failed") -> None:
        super().__init__(message, code=code, hint="the log says why; it is kept", paths=(log,))
        self.log_tail = tail(log, TAIL_LINES)


class Server:
    """One server.

    Args:
        request: what is measured.
        side: which of the two.
        port: where it listens.
        folder: its own, for its log and its model.
        number: of this start, counted from 1.
    """

    # a server that has gigabytes to give back, and workers to wait for
    grace_s = 30.0

    def __init__(self, request: Request, side: Side, port: int, folder: Path, number: int = 1) -> None:
        self.request, self.side, self.port = request, side, port
        self.base_url = f"http://{HOST}:{port}"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / (LOG if number == 1 else f"server-{number}.log")
        self.command = arguments.serve_command(request, side, port, folder)
        self.start_s: float | None = None
        self._began = time.monotonic()
        self._process = Guarded(
            self.command, self.log, arguments.environment(request, side), folder, self.grace_s
        )

    def wait(self, say: Say) -> None:
        """Returns when it answers, as the one that we have started.

        Raises:
            ServerError: it ended, did not answer in time, or another server has its port.
        """
        told = self._began
        while True:
            self.require_alive("did not start: it")
            if self._answers():
                break
            now = time.monotonic()
            if now - self._began > self.request.start_timeout_s:
                raise ServerError(
                    f"the {self.side.name} server did not answer within {self.request.start_timeout_s:g} s",
                    self.log,
                )
            if now - told >= _EVERY_S:
                told = now
                last = tail(self.log, 1)
                say(f"{self.side.name}: starting, {now - self._began:.0f} s; {last[0][:160] if last else ''}")
            time.sleep(_POLL_S)
        self.start_s = round(time.monotonic() - self._began, 1)
        say(f"{self.side.name}: answers after {self.start_s:.0f} s on port {self.port}")

    def _answers(self) -> bool:
        try:
            api.get(f"{self.base_url}/health", 5.0)
            names = [one["id"] for one in json.loads(api.get(f"{self.base_url}/v1/models", 5.0))["data"]]
        except (api.HttpError, ValueError, KeyError, TypeError):
            return False
        wanted = self.request.served_name(self.side)
        if wanted not in names:
            raise ServerError(
                f"another server answers on port {self.port}: it serves {', '.join(names)}, not {wanted}",
                self.log,
            )
        return True

    def require_alive(self, what: str = "is gone: it") -> None:
        """Raises ServerError where it has ended."""
        ended = self._process.ended()
        if ended is None:
            return
        self._process.stop()
        cause = cause_in(self.log)
        raise ServerError(
            f"the {self.side.name} server {what} {ended}{f': {cause}' if cause else ''}", self.log
        )

    def ask(self) -> None:
        """Begins to end it, and does not wait."""
        self._process.ask()

    def hurry(self) -> None:
        """Takes its grace away, and does not wait."""
        self._process.hurry()

    def stop(self) -> list[int]:
        """Ends it; twice is fine.

        Returns:
            Processes of it that are still there.
        """
        return self._process.stop()

    def to_json(self) -> dict[str, Any]:
        """What the result file says of it; paths as the folder of logs has them."""
        overlay, kv_tokens = live.read(self.log)
        folder = f"{self.log.parents[1]}/"
        served = self.command[self.command.index("serve") :]
        return {
            "name": self.side.name,
            "command": ["vllm", *(word.replace(folder, "") for word in served)],
            "switched_off": list(self.side.off),
            "start_s": self.start_s,
            "kv_tokens": kv_tokens,
            "overlay": overlay.to_json(),
            "log": str(self.log).replace(folder, ""),
        }


def cause_in(log: Path, lines: int = 400) -> str | None:
    """The exception in a log's end that says most: the first one that was raised there."""
    for line in tail(log, lines):
        found = _ERROR.search(line)
        # what every parent says of its child
        if found and "Engine core initialization failed" not in found[1]:
            return found[1][:400]
    return None
