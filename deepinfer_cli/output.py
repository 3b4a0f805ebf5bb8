"""The one place that prints: results on stdout, everything else on stderr."""

from __future__ import annotations

import json as jsonlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from deepinfer_cli import render
from deepinfer_cli.errors import DeepInferError, FailedError, UsageError
from deepinfer_cli.result import SCHEMA_VERSION, ErrorItem, Result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# fewer characters than this a column, and a table has one value a line
_COLUMN_WIDTH = 12
_THEME = {"ok": "green", "warn": "yellow", "error": "bold red", "dim": "dim"}


class Progress:
    """Shows that work goes on: a bar on a terminal, plain lines in a log, nothing with `--quiet` or `--json`."""

    def __init__(self, out: Output, bar: RichProgress | None, task: TaskID | None) -> None:
        self._out = out
        self._bar = bar
        self._task = task

    def advance(self, description: str | None = None, by: int = 1) -> None:
        """Counts `by` items as done and names the one now at work."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=by, description=description)

    def line(self, text: str) -> None:
        """One line per group of items where there is no bar, so that a log shows life."""
        if self._bar is None:
            self._out.note(text)

    def say(self, text: str) -> None:
        """What is being done now: beside the spinner on a terminal, a line elsewhere."""
        self.advance(text, by=0)
        self.line(text)


class Output:
    """Prints for one command.

    Args:
        json: one JSON document is the only thing on stdout; notes and progress are silent.
        quiet: results, warnings and errors only.
        verbose: how often `-v` was given.
        color: False for no colour and no bold.

    Attributes:
        complete: makes the commands in a text such that they can be pasted.
    """

    def __init__(
        self, *, json: bool = False, quiet: bool = False, verbose: int = 0, color: bool = True
    ) -> None:
        self.json = json
        self.quiet = quiet
        self.verbose = verbose
        self.color = color and not os.environ.get("NO_COLOR")
        self.complete: Callable[[str], str] = lambda text: text
        self._dead: set[int] = set()
        self._lost: OSError | None = None

    # results

    def table(self, content: render.Table) -> None:
        """A result table; TAB-separated and uncut when stdout is no terminal."""
        if self.json:
            return
        rows = tuple(tuple(self.complete(value) for value in row) for row in content.rows)
        content = replace(content, rows=rows)
        if not _is_terminal(sys.stdout):
            self._write(sys.stdout, render.piped(content))
            return
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        console = self._console(sys.stdout)
        if len(content.columns) > 2 and console.width < _COLUMN_WIDTH * len(content.columns):
            content = render.stacked(content)
        grid = RichTable(
            box=SIMPLE_HEAD,
            title=content.title,
            title_justify="left",
            title_style="bold" if self.color else "",
        )
        for header, justify in content.columns:
            grid.add_column(header, justify=justify, overflow="fold")
        for row in content.rows:
            grid.add_row(*(Text(value, style=render.meaning(value)) for value in row))
        with console.capture() as captured:
            console.print(grid)
        self._write(sys.stdout, "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")

    def line(self, text: str = "") -> None:
        """One result line."""
        if not self.json:
            self._write(sys.stdout, self.complete(text) + "\n")

    def raw(self, data: bytes) -> None:
        """A result that is a file's bytes, such as a patch."""
        if self.json:
            return
        buffer = getattr(sys.stdout, "buffer", None)
        if buffer is None:
            self._write(sys.stdout, data.decode("utf-8", "surrogateescape"))
            return
        try:
            sys.stdout.flush()
            buffer.write(data)
            buffer.flush()
        except OSError as error:
            self._lose(sys.stdout, error)

    def emit(self, result: Result) -> None:
        """Ends a command: its errors in words, or the JSON document."""
        if self.json:
            self._write(sys.stdout, document(result))
            return
        for item in result.errors:
            self._error_lines(item)

    def check(self) -> None:
        """Says, once the work is done, that what it printed did not arrive.

        Raises:
            FailedError: a result could not be written (`io-error`); a reader that went away is none.
        """
        if self._lost is not None:
            raise FailedError(
                f"the output cannot be written: {self._lost.strerror or self._lost}",
                code="io-error",
                hint="the command itself has run to its end",
            ) from self._lost

    # everything else

    def note(self, message: str) -> None:
        """Something worth knowing; silent with `--quiet` and `--json`."""
        if not (self.quiet or self.json):
            self._write(sys.stderr, self.complete(message) + "\n")

    def detail(self, message: str) -> None:
        """Something only `-v` shows."""
        if self.verbose:
            self.note(message)

    def warn(self, message: str) -> None:
        """Something that may bite; always shown."""
        self._write(sys.stderr, f"{self._styled('warning:', 'warn')} {self.complete(message)}\n")

    def error(self, error: DeepInferError, command: str) -> None:
        """A failure that ended the command."""
        item = ErrorItem(error.code, error.message, error.hint, error.paths)
        self.emit(Result(command, exit_code=error.exit_code, errors=(item,)))
        if self.json:
            self._error_lines(item)

    def confirm(self, question: str) -> bool:
        """Asks on the terminal.

        Raises:
            UsageError: there is no terminal to ask on (`confirmation-required`).
        """
        if self.json or not (_is_terminal(sys.stdin) and _is_terminal(sys.stderr)):
            raise UsageError(
                f"there is no terminal to ask on: {question}",
                code="confirmation-required",
                hint="pass --yes, or --dry-run to see the plan alone",
            )
        self._write(sys.stderr, f"{question} [y/N] ")
        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    def require_yes(self, question: str, *, yes: bool) -> None:
        """Goes on only with `--yes` or a yes on the terminal.

        Raises:
            UsageError: no terminal (`confirmation-required`).
            FailedError: the answer was no (`declined`).
        """
        if not yes and not self.confirm(question):
            raise FailedError("the answer was no; nothing was changed", code="declined")

    @contextmanager
    def progress(self, total: int | None, description: str) -> Iterator[Progress]:
        """Progress over `total` items, or of unknown length with None; gone from the terminal afterwards."""
        if self.quiet or self.json or not _is_terminal(sys.stderr):
            yield Progress(self, None, None)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        counted = (BarColumn(bar_width=30), MofNCompleteColumn()) if total is not None else ()
        text = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), text, *counted, TimeElapsedColumn())
        console = self._console(sys.stderr)
        with RichProgress(*columns, console=console, transient=True, refresh_per_second=5) as bar:
            yield Progress(self, bar, bar.add_task(description, total=total))

    def _error_lines(self, item: ErrorItem) -> None:
        self._write(sys.stderr, f"{self._styled(f'error[{item.code}]:', 'error')} {item.message}\n")
        for path in item.paths:
            self._write(sys.stderr, f"  {path}\n")
        if item.hint:
            self._write(sys.stderr, f"{self._styled('hint:', 'dim')} {item.hint}\n")

    def _styled(self, text: str, style: str) -> str:
        if not self.color or not _is_terminal(sys.stderr):
            return text
        console = self._console(sys.stderr)
        with console.capture() as captured:
            console.print(text, style=style, end="")
        return captured.get()

    def _console(self, stream: TextIO) -> Console:
        from rich.console import Console
        from rich.theme import Theme

        theme = Theme(_THEME if self.color else dict.fromkeys(_THEME, "none"))
        options: dict[str, Any] = {} if self.color else {"color_system": None, "no_color": True}
        return Console(
            file=cast("TextIO", _Writer(stream, self._write)),
            theme=theme,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=False,
            **options,
        )

    def _write(self, stream: TextIO, text: str) -> None:
        # what is printed must not stop an install half way, nor a rollback: the rest goes nowhere
        if id(stream) in self._dead:
            return
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            self._lose(stream, error)

    def _lose(self, stream: TextIO, error: OSError) -> None:
        self._dead.add(id(stream))
        silence(stream)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            self._lost = error


class _Writer:
    """A stream for Rich, which writes by itself, also from a thread: a terminal that is gone ends nothing."""

    def __init__(self, stream: TextIO, write: Callable[[TextIO, str], None]) -> None:
        self._stream = stream
        self._write = write

    def write(self, text: str) -> int:
        self._write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Every write is flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def silence(stream: TextIO) -> None:
    """Sends what is still buffered in a broken stream nowhere, so that the interpreter's own flush is quiet."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        return


def document(result: Result) -> str:
    """The JSON document of a result: sorted keys, NaN and infinities as strings, enums as their value."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "command": result.command,
        "status": result.status,
        "exit_code": int(result.exit_code),
        "data": result.data,
        "errors": [
            {"code": item.code, "message": item.message, "hint": item.hint, "paths": list(item.paths)}
            for item in result.errors
        ],
    }
    return jsonlib.dumps(_plain(content), indent=2, sort_keys=True) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return str(value) if isinstance(value, Path) else value


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False
