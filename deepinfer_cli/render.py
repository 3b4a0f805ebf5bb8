"""Tables as plain data, and the text of the values in them; nothing here prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Justify = Literal["left", "right"]
MISSING = "-"
_MEANINGS = {
    "ok": "ok",
    "passed": "ok",
    "applied": "ok",
    "installed": "ok",
    "supported": "ok",
    "warn": "warn",
    "warning": "warn",
    "note": "warn",
    "skipped": "warn",
    "stale": "warn",
    "unrecorded": "warn",
    "compatible": "warn",
    "error": "error",
    "problem": "error",
    "failed": "error",
    "modified": "error",
    "missing": "error",
    "interrupted": "error",
    "compile_error": "error",
    "runtime_error": "error",
    "timeout": "error",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headers.

    Attributes:
        columns: (header, justification) of each column.
        rows: cells as shown; `-` where there is no value.
        title: shown above it on a terminal, where several tables follow each other.
    """

    columns: tuple[tuple[str, Justify], ...]
    rows: tuple[tuple[str, ...], ...] = field(default=())
    title: str | None = None


def table(
    headers: Sequence[str | tuple[str, Justify]],
    rows: Iterable[Iterable[object]],
    title: str | None = None,
) -> Table:
    """A table from headers (text alone means left-justified) and rows of any values; None becomes `-`."""
    columns = tuple((header, "left") if isinstance(header, str) else header for header in headers)
    return Table(columns, tuple(tuple(cell(value) for value in row) for row in rows), title)  # type: ignore[arg-type]


def stacked(content: Table) -> Table:
    """The same with one value a line, for terminals that are too narrow for the columns."""
    names = [header for header, _ in content.columns]
    rows = [pair for row in content.rows for pair in (*zip(names, row, strict=True), ("", ""))]
    return Table((("Field", "left"), ("Value", "left")), tuple(rows[:-1]), content.title)


def cell(value: object) -> str:
    """The text of one value, always on one line."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or MISSING
    return " ".join(str(value).split())


def meaning(text: str) -> str:
    """The style that a status word is shown in (`ok`, `warn`, `error`), or no style."""
    return _MEANINGS.get(text.lower(), "")


def piped(content: Table) -> str:
    """The form for anything but a terminal: a header line and TAB-separated rows, nothing cut."""
    lines = ["\t".join(header for header, _ in content.columns)]
    lines += ["\t".join(cell(value) for value in row) for row in content.rows]
    return "\n".join(lines) + "\n"


def size(count: int) -> str:
    """Bytes as people read them: `340 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            return f"{value:.0f} {unit}" if unit in {"B", "kB", "MB"} else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def joined(items: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    texts = list(items)
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
