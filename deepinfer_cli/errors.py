"""The one exception type and its kinds; `app.main` turns them into messages and exit codes."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Process exit codes, documented in the README."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNSUPPORTED = 3
    REFUSED = 4
    INTERRUPTED = 130


class DeepInferError(Exception):
    """An expected failure: what happened, what to do, and the exit code that says which kind it is.

    Args:
        message: what happened and to which thing; lower case, no full stop.
        code: kebab-case name, stable for scripts (`error[<code>]`).
        hint: what to do next, or None.
        paths: files the message is about, shown one per line.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(
        self,
        message: str,
        *,
        code: str,
        hint: str | None = None,
        paths: tuple[Path | str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint
        self.paths = tuple(str(path) for path in paths)


class FailedError(DeepInferError):
    """Ran and failed; nothing is left half-done."""

    exit_code = ExitCode.FAILED


class UsageError(DeepInferError):
    """Wrong options, or a confirmation was needed and no terminal could give it."""

    exit_code = ExitCode.USAGE


class UnsupportedError(DeepInferError):
    """This machine, vLLM or GPU is not one we serve."""

    exit_code = ExitCode.UNSUPPORTED


class RefusedError(DeepInferError):
    """Files are not what they must be; `--force` or another command is the way on."""

    exit_code = ExitCode.REFUSED


class Interruption(DeepInferError):
    """Ctrl-C or SIGTERM; what was begun has been put back, or was done: the message says which."""

    exit_code = ExitCode.INTERRUPTED
