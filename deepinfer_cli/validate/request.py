"""What `verify` was asked for, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.detect.target import Target
from deepinfer_cli.validate import runner
from deepinfer_cli.validate.forced import ARCHS
from deepinfer_cli.validate.model import CaseResult, Level
from deepinfer_cli.validate.ops import languages_of


@dataclass(frozen=True, slots=True)
class Request:
    """What to verify.

    Attributes:
        target: the vLLM; None verifies the bundled payload alone.
        payload_root: the overlay to test.
        python: interpreter of the workers.
        levels: the levels asked for; empty means all that are possible.
        ops: ops asked for; empty means all of the payload.
        case: one case id; nothing else runs.
        archs: architectures of the compile gate; the first is forced on a card that is not SM8x.
        arch: the one given with `--arch`, None without.
        max_smem: only variants of at most so many bytes of shared memory.
    """

    target: Target | None
    payload_root: Path
    python: Path
    levels: tuple[Level, ...] = ()
    suite: str = "smoke"
    ops: tuple[str, ...] = ()
    case: str | None = None
    arch: str | None = None
    max_smem: int | None = None
    timeout_s: float = runner.DEFAULT_TIMEOUT_S

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures that the compile gate builds for."""
        return (self.arch,) if self.arch else ARCHS


@dataclass(slots=True)
class Run:
    """A `verify` under way.

    Attributes:
        request: what was asked for.
        digest: the payload's.
        ops: those that run.
        caches: variables of the kernel caches that its workers share.
        found: what the interpreter has (`runner.probe`).
        notes: for the report.
        crew: the workers that run side by side.
        took: level, op and seconds; the op of a level's own time is empty.
    """

    request: Request
    digest: str
    ops: tuple[str, ...]
    caches: dict[str, str]
    found: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    crew: runner.Crew = field(default_factory=runner.Crew)
    took: list[tuple[Level, str, float]] = field(default_factory=list)

    def job(self, task: str, level: Level, op: str, env: dict[str, str], **more: Any) -> runner.Job:
        """A worker's, for one op; `env` and `more` go to its variables and its request."""
        body = {
            "task": task, "level": level.value, "payload": str(self.request.payload_root), "digest": self.digest,
            "op": op, "suite": self.request.suite, "archs": list(self.request.archs),
            "max_smem": self.request.max_smem, **more,
        }  # fmt: skip
        return runner.Job(self.request.python, body, self.caches | env, self.request.timeout_s)

    def languages(self, op: str) -> tuple[str, ...]:
        """What the op's kernels are written in."""
        return languages_of(self.request.payload_root, op)

    def run(self, jobs: list[runner.Job], at_once: int) -> Iterator[CaseResult]:
        """Results of the one case asked for, or of all."""
        cases = [self.request.case] if self.request.case else None
        yield from runner.run_many(jobs, cases, at_once, within=self.crew, on_end=self._end)

    def _end(self, job: runner.Job, seconds: float) -> None:
        self.took.append((job.level, str(job.request["op"]), seconds))
