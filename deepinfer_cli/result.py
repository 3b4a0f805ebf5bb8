"""What a command returns; `output` prints it as tables or as one JSON document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_cli.errors import ExitCode

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ErrorItem:
    """One entry of the JSON document's `errors`."""

    code: str
    message: str
    hint: str | None = None
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one command.

    Attributes:
        command: name of the verb, such as `install`.
        data: JSON-ready content; also what the renderer reads.
        exit_code: the process's exit code.
        errors: failures that did not stop the command from answering.
    """

    command: str
    data: dict[str, Any] = field(default_factory=dict)
    exit_code: ExitCode = ExitCode.OK
    errors: tuple[ErrorItem, ...] = ()

    def completed(self, complete: Callable[[str], str]) -> Result:
        """The same with hints that can be pasted (see `Output.complete`)."""
        errors = tuple(replace(item, hint=item.hint and complete(item.hint)) for item in self.errors)
        return replace(self, errors=errors)

    @property
    def status(self) -> str:
        """`success`, `partial` (answered, but not all is well) or `error`."""
        if self.exit_code == ExitCode.OK:
            return "success"
        return "partial" if self.data else "error"
