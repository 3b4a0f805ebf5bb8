"""Measures both servers: starts them, warms them up, drives them in turns, scores the text, ends them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.errors import DeepInferError, FailedError
from deepinfer_cli.validate.serving import api, rows, score, text
from deepinfer_cli.validate.serving.bench import Client, Outcome
from deepinfer_cli.validate.serving.plan import (
    PIECE_TOKENS,
    PIECES,
    Request,
    Side,
    Turn,
    benches,
    has_option,
    turns,
)
from deepinfer_cli.validate.serving.process import free_ports
from deepinfer_cli.validate.serving.server import Server

Say = Callable[[str], None]


def check(request: Request) -> None:
    """Sees, before anything is started or written, that running servers answer and that chosen ports are free.

    Raises:
        FailedError: an endpoint serves no model (`endpoint-failed`).
        UsageError: something listens on a port (`port-in-use`).
    """
    for side in request.sides:
        if side.base_url is not None:
            api.first_model(side.base_url)
    if request.started and request.port is not None:
        free_ports(len(request.sides) if request.together else 1, request.port)


# the guard looks at its command more often than this
_NOTICED_S = 0.5


@dataclass(slots=True)
class Measured:
    """What a measurement has shown so far.

    Attributes:
        outcomes: every run that is no warm-up.
        scores: side's name → NLLs of each run.
        servers: what the result file says of each start (see `Server.to_json`).
        scored: of the text: source, sha256, pieces, tokens.
        versions: of vLLM and what it needs.
        problem: why it ended early.
        left: processes that could not be ended.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    scores: dict[str, list[list[float]]] = field(default_factory=dict)
    servers: list[dict[str, Any]] = field(default_factory=list)
    scored: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    problem: DeepInferError | None = None
    left: list[int] = field(default_factory=list)


class Drive:
    """One measurement.

    Args:
        request: what to measure.
        folder: for everything that it writes; kept.
        say: for progress, a line each.
    """

    def __init__(self, request: Request, folder: Path, say: Say) -> None:
        self.request, self.folder, self.say = request, folder, say
        self.measured = Measured()
        self._pieces: list[list[int]] = []
        self._starts: dict[str, int] = {}

    def run(self) -> Measured:
        """Measures; whatever ends it early leaves what was measured before, and no process.

        Raises:
            DeepInferError: a server did not come up, or nothing could be measured at all.
        """
        (self.folder / "client").mkdir(parents=True, exist_ok=True)
        prompts = self.request.prompts and self.request.prompts.resolve()
        if any(work.prompts == "code" for work in self.request.workloads()):
            prompts = self.folder / "client" / "prompts.json"
            text.write_prompts(prompts, self.request.seed)
        for number, turn in enumerate(turns(self.request)):
            try:
                self._turn(turn, number, prompts)
            except DeepInferError as error:
                if not self.measured.outcomes:
                    raise
                self.measured.problem = error
                break
        return self.measured

    def _turn(self, turn: Turn, number: int, prompts: Path | None) -> None:
        with self._servers(turn) as servers:

            def watch() -> None:
                for server in servers:
                    server.require_alive()

            urls = {side.name: side.base_url or "" for side in turn.sides}
            urls |= {server.side.name: server.base_url for server in servers}
            # a running server that is none is known before anything is measured
            names = {side.name: self._model_name(side, urls[side.name]) for side in turn.sides}
            client = Client(self.request, self.folder / "client", str(number), prompts, watch, self.say)
            line = benches(self.request, turn, number)
            try:
                # a client is ended with its generator
                with contextlib.closing(client.run(line, urls)) as outcomes:
                    for done, outcome in enumerate(outcomes, 1):
                        self._take(outcome, done, len(line))
                        self.measured.versions = client.versions
                        if outcome.reason:
                            _patiently(watch)
                self._score(turn, urls, names)
            except FailedError:
                # a server that went away explains what else failed
                _patiently(watch)
                raise
            finally:
                self.measured.left += client.left

    def _take(self, outcome: Outcome, done: int, of: int) -> None:
        bench = outcome.bench
        if bench.repeat is not None:
            self.measured.outcomes.append(outcome)
        shown = rows.of_run(bench.workload, outcome)
        figures = ", ".join(f"{name} {value:,.2f}" for name, value in shown["metrics"].items())
        what = "warm-up" if bench.repeat is None else f"run {bench.repeat + 1}"
        self.say(
            f"[{done}/{of}] {bench.side.name}: {bench.workload.text}, {what}: "
            f"{figures if shown['status'] == 'PASSED' else shown['reason']}"
        )

    @contextlib.contextmanager
    def _servers(self, turn: Turn) -> Iterator[list[Server]]:
        """The turn's servers, answering; ended afterwards, whatever happens, and their logs read."""
        started: list[Server] = []
        try:
            if self.request.started:
                self._start(turn, started)
            yield started
        finally:
            hurried = self._stop(started)
        if hurried:
            # nothing had been interrupted before
            raise KeyboardInterrupt

    def _stop(self, started: list[Server]) -> bool:
        """Ends them; whether Ctrl-C came meanwhile, which kills them at once and leaves none behind."""
        from deepinfer_cli.overlay.signals import attended

        def kill() -> None:
            hurried.append(True)
            for server in started:
                server.hurry()

        hurried: list[bool] = []
        with attended(kill):
            for server in started:
                server.ask()
                self.say(
                    f"{server.side.name}: stopping, up to {server.grace_s:.0f} s; Ctrl-C now kills it at once"
                )
            self.measured.left += [pid for server in started for pid in server.stop()]
            self.measured.servers += [server.to_json() for server in started]
        return bool(hurried)

    def _start(self, turn: Turn, started: list[Server]) -> None:
        # a fixed cache is not measured beside what else is on the card: both may start at once
        at_once = self.request.small or has_option(self.request.extra, "--kv-cache-memory-bytes")
        ports = free_ports(len(turn.sides), self.request.port)
        for side, port in zip(turn.sides, ports, strict=True):
            count = self._starts[side.name] = self._starts.get(side.name, 0) + 1
            started.append(Server(self.request, side, port, self.folder / side.name, count))
            self.say(f"{side.name}: starting on port {port}; its log is {started[-1].log}")
            if not at_once:
                started[-1].wait(self.say)
        for server in started:
            if server.start_s is None:
                server.wait(self.say)

    def _score(self, turn: Turn, urls: dict[str, str], names: dict[str, str]) -> None:
        timeout = self.request.run_timeout_s
        if not self._pieces:
            self._pieces = self._text(urls, names, timeout)
            tokens = sum(len(piece) for piece in self._pieces)
            self.measured.scored |= {"pieces": len(self._pieces), "tokens": tokens}
        for repeat in turn.repeats:
            for side in turn.sides if repeat % 2 == 0 else reversed(turn.sides):
                found = score.nll(urls[side.name], names[side.name], self._pieces, timeout)
                self.measured.scores.setdefault(side.name, []).append(found)
                self.say(f"{side.name}: NLL {sum(found) / len(found):.5f} nats a token, run {repeat + 1}")

    def _model_name(self, side: Side, url: str) -> str:
        return self.request.served_name(side) if self.request.started else api.first_model(url)

    def _text(self, urls: dict[str, str], names: dict[str, str], timeout: float) -> list[list[int]]:
        if self.request.small:
            self.measured.scored = {"source": "random tokens"}
            return score.pieces(score.random_ids(PIECE_TOKENS * PIECES, 7), PIECE_TOKENS, PIECES)
        words, self.measured.scored = text.to_score(self.request.text)
        ids = [score.tokenize(urls[name], names[name], words, timeout) for name in names]
        if any(other != ids[0] for other in ids[1:]):
            raise FailedError(
                "the two servers do not read the same text alike: their tokenizers differ",
                code="score-failed",
            )
        if len(ids[0]) < 2:
            raise FailedError("the text has no second token to score", code="score-failed")
        return score.pieces(ids[0], PIECE_TOKENS, PIECES)


def _patiently(watch: Callable[[], None]) -> None:
    """Looks at the servers when there has been time to notice that one is gone."""
    time.sleep(_NOTICED_S)
    watch()
