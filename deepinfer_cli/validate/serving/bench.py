"""Runs the client with a list of runs, and gives their results as they come, whatever becomes of the client."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.errors import FailedError
from deepinfer_cli.validate.serving import arguments
from deepinfer_cli.validate.serving.plan import Bench, Request
from deepinfer_cli.validate.serving.process import Guarded, following, tail

CLIENT = Path(__file__).with_name("client.py")
LOG = "client.log"
# importing vLLM from a slow disk
_HELLO_S = 600.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run.

    Attributes:
        bench: the run.
        event: the client's (see `client.one`); None where it failed.
        reason: why.
        seconds: how long it took, the client's own work included.
    """

    bench: Bench
    event: dict[str, Any] | None
    reason: str
    seconds: float


class Client:
    """The runs of one stretch, in one client process after another.

    Args:
        request: what is measured.
        folder: for its files; each run's result file too.
        name: of the stretch, for the names of its files.
        prompts: file of decode prompts, where they are not random.
        watch: called again and again; raises where going on makes no sense.
        say: for what the user may want to know.

    Attributes:
        versions: of vLLM and what it needs, as the client says.
        left: processes of it that could not be ended.
    """

    def __init__(
        self,
        request: Request,
        folder: Path,
        name: str,
        prompts: Path | None,
        watch: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.request, self.folder, self.name, self.prompts = request, folder, name, prompts
        self.watch, self.say = watch, say
        self.versions: dict[str, str | None] = {}
        self.left: list[int] = []
        self._number = 0

    def run(self, benches: list[Bench], urls: Mapping[str, str]) -> Generator[Outcome, None, None]:
        """Every run's outcome, in order. A run during which its client died is lost; the next has a new one.

        Args:
            benches: the runs.
            urls: side's name → its server.

        Raises:
            FailedError: the client cannot start (`client-failed`), or `watch` raised.
        """
        left = list(benches)
        while left:
            before = len(left)
            with contextlib.closing(self._one_client(left, urls)) as outcomes:
                for outcome in outcomes:
                    left = left[1:]
                    yield outcome
            if len(left) == before:
                raise FailedError(
                    "the benchmark client ended before its first run",
                    code="client-failed",
                    hint="; ".join(tail(self.folder / LOG, 3)) or None,
                    paths=(self.folder / LOG,),
                )

    def _one_client(self, benches: list[Bench], urls: Mapping[str, str]) -> Generator[Outcome, None, None]:
        self._number += 1
        plan, events = (
            self.folder / f"{name}-{self.name}-{self._number}.json" for name in ("runs", "events")
        )
        events.touch(exist_ok=False)
        runs = [
            arguments.bench_request(one, self.request, urls[one.side.name], self.folder, self.prompts)
            for one in benches
        ]
        parent = str(self.request.parent) if self.request.parent else None
        plan.write_text(json.dumps({"events": str(events), "parent": parent, "runs": runs}), encoding="utf-8")
        process = Guarded(
            [str(self.request.python), str(CLIENT), str(plan)],
            self.folder / LOG, arguments.environment(self.request, None), self.folder, grace_s=3.0,
        )  # fmt: skip
        try:
            yield from self._follow(process, events, benches)
        finally:
            self.left += process.stop()

    def _follow(self, process: Guarded, events: Path, benches: list[Bench]) -> Generator[Outcome, None, None]:
        waiting = list(benches)
        running: Bench | None = None
        over: str | None = None
        began, limit = time.monotonic(), _HELLO_S
        for line in following(events):
            if not line:
                if over:
                    if running is not None:
                        yield Outcome(running, None, f"the client {over}", time.monotonic() - began)
                    return
                # what it wrote before its end is read first
                over = process.ended()
                self.watch()
                if time.monotonic() - began > limit:
                    if running is not None:
                        yield Outcome(running, None, f"not done within {limit:g} s", time.monotonic() - began)
                    return
                time.sleep(_POLL_S)
                continue
            event: dict[str, Any] = {}
            with contextlib.suppress(ValueError):
                event = json.loads(line)
            kind = event.get("event")
            if kind == "hello":
                self.versions = event["versions"]
            elif kind == "start":
                running, began, limit = waiting[0], time.monotonic(), self.request.run_timeout_s
            elif kind in ("run", "error") and running is None:
                raise FailedError(
                    f"vLLM's benchmark cannot be used: {event.get('message')}",
                    code="client-failed",
                    hint="the interpreter that serves vLLM must be able to run `vllm bench serve`",
                    paths=(self.folder / LOG,),
                )
            elif kind in ("run", "error"):
                assert running is not None
                seconds = time.monotonic() - began
                yield Outcome(waiting.pop(0), event if kind == "run" else None, reason_of(event), seconds)
                running, began, limit = None, time.monotonic(), _HELLO_S
            elif kind == "done":
                return


def reason_of(event: dict[str, Any]) -> str:
    """Why a run's figures are none; empty where they are good."""
    if event["event"] == "error":
        return str(event["message"])
    result = event["result"]
    if result["errors"] or result.get("failed"):
        first = result["errors"][0] if result["errors"] else "no reason given"
        return f"{result.get('failed') or len(result['errors'])} requests failed: {' '.join(first.split())[-300:]}"
    if not result["ttfts"] or not all(result["ttfts"]):
        return "no request was answered"
    return ""
