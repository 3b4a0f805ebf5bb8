"""What a validation run is made of: levels, statuses, results. Standard library only: workers import it too."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Level(str, Enum):
    """Kinds of proof, from cheap to dear."""

    STATIC = "static"
    COMPILE = "compile"
    INTERPRETER = "interpreter"
    NUMERICS = "numerics"
    LIVE = "live"


class Status(str, Enum):
    """The outcome of one case."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    COMPILE_ERROR = "COMPILE_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    TIMEOUT = "TIMEOUT"
    SKIPPED = "SKIPPED"

    @property
    def bad(self) -> bool:
        """Whether this makes the run a failure; a skipped case is neither good nor bad."""
        return self not in (Status.PASSED, Status.SKIPPED)


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The first element that is wrong.

    Attributes:
        output: name of the output tensor.
        index: its index; empty when shape or dtype is what differs.
        got, want: both values as text (NaN and infinities survive JSON that way).
    """

    output: str
    index: tuple[int, ...]
    got: str
    want: str


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case at one level.

    Attributes:
        case: its id, such as `gather[two-requests]`.
        reason: why it was skipped or how it failed; empty when it passed.
        max_abs, max_rel: largest errors over the finite elements, None where nothing was compared.
        matched_ratio: share of elements inside the tolerance.
        extra: level-specific facts (registers, shared memory, repeats, the tail of stderr).
    """

    case: str
    op: str
    level: Level
    status: Status
    reason: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    matched_ratio: float | None = None
    first_bad: FirstBad | None = None
    duration_s: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; enums become their values, empty fields stay."""
        data = asdict(self)
        data["level"] = self.level.value
        data["status"] = self.status.value
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CaseResult:
        """The inverse of `to_json`."""
        bad = data.get("first_bad")
        values = {
            **data,
            "level": Level(data["level"]),
            "status": Status(data["status"]),
            "first_bad": FirstBad(bad["output"], tuple(bad["index"]), bad["got"], bad["want"])
            if bad
            else None,
        }
        return cls(**values)


@dataclass(frozen=True, slots=True)
class NotRun:
    """A level, or a part of one, that this machine could not run.

    Attributes:
        level: which.
        reason: why.
        how: what to do about it.
    """

    level: Level
    reason: str
    how: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Everything one `verify` found.

    Attributes:
        results: one per case and level.
        not_run: the levels that could not run.
        payload: root and digest of the overlay that was tested.
        notes: facts to show, such as which interpreter ran and on which GPU.
        duration_s: of the whole run.
        seconds: level, op and how long that took; the op is empty for a level's own time. Workers run side by side.
    """

    results: tuple[CaseResult, ...]
    not_run: tuple[NotRun, ...]
    payload: dict[str, str]
    notes: tuple[str, ...] = ()
    duration_s: float = 0.0
    seconds: tuple[tuple[Level, str, float], ...] = ()

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """The results that make the run a failure."""
        return tuple(result for result in self.results if result.status.bad)

    @property
    def ran(self) -> bool:
        """Whether anything was proved or disproved at all; skipped cases prove nothing."""
        return any(result.status is not Status.SKIPPED for result in self.results)

    def count(self, status: Status) -> int:
        """How many results have `status`."""
        return sum(result.status is status for result in self.results)
