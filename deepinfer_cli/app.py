"""The one place that catches errors: runs a command line, says what went wrong, returns the exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

import typer

from deepinfer_cli.cli import app
from deepinfer_cli.commands.hints import program
from deepinfer_cli.entry import verb as verb_of
from deepinfer_cli.errors import DeepInferError, ExitCode, FailedError, Interruption, UsageError
from deepinfer_cli.output import Output, silence

# Typer has no public name for it, and its base package changed between versions
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# what Typer's versions say of a value (Pydantic's words, or Click's) → the same without the library's terms
_IT = r"(?<=: )(?:'.*'|\S+) is not"
_PLAIN = (
    (
        rf"Input should be a valid integer\b.*|{_IT} a valid int(?:eger)?(?: range)?",
        "it must be a whole number",
    ),
    (rf"Input should be a (?:valid|finite) number\b.*|{_IT} a valid float(?: range)?", "it must be a number"),
    (
        rf"Input should be greater than or equal to (\S+)|{_IT} in the range x>=(\S+)",
        r"it must be \1\2 or more",
    ),
    (rf"Input should be less than or equal to (\S+)|{_IT} in the range x<=(\S+)", r"it must be \1\2 or less"),
    (rf"{_IT} in the range (\S+)<=x<=(\S+)", r"it must be \1 to \2"),
    ("Value error, ", ""),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; every failure is said here, once."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # a path that the terminal's encoding cannot show must not end a command
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    verb = verb_of(arguments)
    out = Output(json="--json" in arguments, color="--no-color" not in arguments)
    try:
        code = app(args=arguments or ["--help"], prog_name="deepinfer", standalone_mode=False)
    except DeepInferError as error:
        _traceback(arguments)
        out.error(error, verb)
        return int(error.exit_code)
    except _UsageError as error:
        return _usage(error, verb, out)
    except (KeyboardInterrupt, typer.Abort):
        code = ExitCode.INTERRUPTED
    except SystemExit as error:
        # Typer's way out when its own output met a closed pipe
        return error.code if isinstance(error.code, int) else int(ExitCode.FAILED)
    except OSError as error:
        _traceback(arguments)
        out.error(_io_error(error), verb)
        return int(ExitCode.FAILED)
    except Exception as error:
        _traceback(arguments)
        _unexpected(error, verb, out, shown="--debug" in arguments)
        return int(ExitCode.FAILED)
    finally:
        # Typer prints by itself; the interpreter would flush again, with a traceback
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                silence(stream)
    if code == ExitCode.INTERRUPTED:
        out.error(Interruption("interrupted", code="interrupted"), verb)
    return int(code or 0)


def _open_closed_streams() -> None:
    """A stream that the caller closed (`>&-`) leads nowhere, and no file of ours gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  # for good


def _io_error(error: OSError) -> FailedError:
    return FailedError(
        f"a file or folder cannot be used: {error.strerror or error}",
        code="io-error",
        hint="run as a user who may use it, such as vLLM's owner"
        if isinstance(error, PermissionError)
        else "look after it and its disk; --debug shows where",
        paths=(str(error.filename),) if error.filename else (),
    )


def _traceback(arguments: Sequence[str]) -> None:
    if "--debug" in arguments:
        import traceback

        with suppress(OSError):
            sys.stderr.write(traceback.format_exc())


def _usage(error: Exception, verb: str, out: Output) -> int:
    message = _plain(str(getattr(error, "format_message", lambda: error)()))
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "deepinfer" if verb == "deepinfer" else f"deepinfer {verb}"
    message = message[:1].lower() + message[1:]
    out.error(
        UsageError(message, code="usage", hint=f"{path.replace('deepinfer', program(), 1)} --help"), verb
    )
    return int(ExitCode.USAGE)


def _plain(message: str) -> str:
    message = message.rstrip(".")
    for said, plain in _PLAIN:
        message = re.sub(said, plain, message)
    return message


def _unexpected(error: Exception, verb: str, out: Output, *, shown: bool) -> None:
    hint = "this is a bug in DeepInfer: please report it with the traceback"
    if not shown:
        hint = "this is a bug in DeepInfer: run it again with --debug and report the traceback"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and missing.partition(".")[0] not in ("deepinfer_cli", "deepinfer_sm80"):
        hint = (
            "this Python lacks a package that DeepInfer needs: install DeepInfer with pip, which brings them"
        )
        out.error(FailedError(text, code="missing-package", hint=hint), verb)
        return
    out.error(FailedError(text, code="unexpected", hint=hint), verb)
