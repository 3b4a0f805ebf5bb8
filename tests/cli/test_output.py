"""Where things are printed, and how: terminals, pipes, JSON, prompts, progress."""

from __future__ import annotations

import errno
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli import render
from deepinfer_cli.detect.target import TargetKind
from deepinfer_cli.errors import ExitCode, FailedError, UsageError
from deepinfer_cli.output import Output, document
from deepinfer_cli.render import cell, joined, piped, plural, size, table
from deepinfer_cli.result import ErrorItem, Result

LONG = "vllm/" + "a-rather-long-folder-name/" * 12 + "file.py"
CONTENT = table(
    ("Path", ("Size", "right"), "State"), [(LONG, 12, "modified"), ("[b]", None, "ok")], title="Files"
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


Streams = Callable[..., tuple[Terminal, Terminal]]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """`terminal()` makes stdout and stderr terminals, 80 columns wide; to be called in the test, where pytest has
    set its own streams already."""

    def attach() -> tuple[Terminal, Terminal]:
        streams = Terminal(), Terminal()
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        monkeypatch.setenv("COLUMNS", "80")
        return streams

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return attach


def test_piped_tables_are_tab_separated_and_uncut(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table(CONTENT)
    assert capsys.readouterr().out == f"Path\tSize\tState\n{LONG}\t12\tmodified\n[b]\t-\tok\n"


def test_a_tab_or_newline_in_a_value_does_not_break_the_row() -> None:
    assert piped(table(("A", "B"), [("x\ty", "l1\nl2")])) == "A\tB\nx y\tl1 l2\n"


def test_terminal_tables_fold_and_never_cut(terminal: Streams) -> None:
    stdout, _ = terminal()
    Output().table(CONTENT)
    shown = stdout.getvalue()
    assert "…" not in shown
    assert "Files" in shown
    assert "[b]" in shown
    assert "\x1b[" in shown
    assert all(len(line) <= 80 for line in shown.replace("\x1b", "").splitlines() if "[" not in line)


def test_a_table_too_wide_for_the_terminal_has_one_value_a_line(
    terminal: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout, _ = terminal()
    monkeypatch.setenv("COLUMNS", "40")
    rows = [("driver", "ok", "580.65.06", ""), ("vLLM", "error", "there is no vLLM here", "name one")]
    Output(color=False).table(table(("Check", "Status", "Value", "Hint"), rows))
    lines = [" ".join(line.split()) for line in stdout.getvalue().splitlines()]
    assert "Value there is no vLLM here" in lines
    assert lines.index("Check vLLM") > lines.index("Value 580.65.06")


@pytest.mark.parametrize("how", ["option", "variable"])
def test_no_color_drops_colour_and_bold(how: str, terminal: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = terminal()
    if how == "variable":
        monkeypatch.setenv("NO_COLOR", "1")
    out = Output(color=how != "option")
    out.table(CONTENT)
    out.warn("careful")
    out.emit(Result("x", exit_code=ExitCode.FAILED, errors=(ErrorItem("code", "broke", "mend"),)))
    assert "\x1b" not in stdout.getvalue() + stderr.getvalue()


def test_a_dumb_terminal_gets_no_colour(terminal: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, _ = terminal()
    monkeypatch.setenv("TERM", "dumb")
    Output().table(CONTENT)
    assert "\x1b" not in stdout.getvalue()


def test_errors_are_coloured_on_a_terminal_only(terminal: Streams) -> None:
    stdout, stderr = terminal()
    Output().error(FailedError("broke [here]", code="code", paths=("a",)), "x")
    assert "\x1b" in stderr.getvalue()
    assert "broke [here]\n  a\n" in stderr.getvalue()
    assert stdout.getvalue() == ""


def test_notes_are_on_stderr_and_follow_quiet_verbose_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    for out, expected in (
        (Output(), "note\n"),
        (Output(verbose=1), "note\ndetail\n"),
        (Output(quiet=True, verbose=1), ""),
        (Output(json=True), ""),
    ):
        out.note("note")
        out.detail("detail")
        assert capsys.readouterr() == ("", expected)


def test_warnings_are_always_shown_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for out in (Output(), Output(quiet=True), Output(json=True)):
        out.warn("careful")
        assert capsys.readouterr() == ("", "warning: careful\n")


def test_json_is_the_only_thing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(json=True)
    out.table(CONTENT)
    out.line("text")
    out.raw(b"bytes")
    out.emit(Result("status", {"b": 1, "a": Path("/x")}))
    shown = capsys.readouterr().out
    assert json.loads(shown) == {
        "schema_version": 1,
        "command": "status",
        "status": "success",
        "exit_code": 0,
        "data": {"a": "/x", "b": 1},
        "errors": [],
    }
    assert shown.index('"a"') < shown.index('"b"')


def test_json_values_are_plain() -> None:
    data = {
        "kind": TargetKind.TREE,
        "nan": math.nan,
        "inf": -math.inf,
        "set": {"b", "a"},
        "tuple": (1, True, None),
    }
    plain = json.loads(document(Result("x", data)))["data"]
    assert plain == {"kind": "tree", "nan": "nan", "inf": "-inf", "set": ["a", "b"], "tuple": [1, True, None]}


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (Result("x"), "success"),
        (Result("x", {"a": 1}, ExitCode.FAILED), "partial"),
        (Result("x", {}, ExitCode.FAILED), "error"),
    ],
)
def test_status_follows_exit_code_and_data(result: Result, status: str) -> None:
    assert json.loads(document(result))["status"] == status


def test_without_a_terminal_a_question_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for out in (Output(), Output(json=True)):
        with pytest.raises(UsageError) as caught:
            out.require_yes("Install?", yes=False)
        assert caught.value.code == "confirmation-required"
        assert "--yes" in (caught.value.hint or "")
    Output().require_yes("Install?", yes=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("answer", "agreed"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_a_question_is_asked_on_stderr_and_only_yes_counts(
    answer: str, agreed: bool, terminal: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout, stderr = terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    out = Output()
    if agreed:
        out.require_yes("Install?", yes=False)
    else:
        with pytest.raises(FailedError) as caught:
            out.require_yes("Install?", yes=False)
        assert (caught.value.code, caught.value.exit_code) == ("declined", ExitCode.FAILED)
    assert stdout.getvalue() == ""
    assert stderr.getvalue() == "Install? [y/N] "


def test_progress_without_a_terminal_is_one_line_per_group(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress(2, "verify") as progress:
        progress.advance("case 1")
        progress.advance("case 2")
        progress.line("verify: gather 2/2")
    assert capsys.readouterr() == ("", "verify: gather 2/2\n")


@pytest.mark.parametrize("out", [Output(quiet=True), Output(json=True)])
def test_progress_is_silent_when_quiet_or_json(out: Output, capsys: pytest.CaptureFixture[str]) -> None:
    with out.progress(None, "verify") as progress:
        progress.advance("case")
        progress.line("group")
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_leaves_nothing_behind(terminal: Streams) -> None:
    stdout, stderr = terminal()
    with Output(color=False).progress(2, "verify [1]") as progress:
        progress.advance()
        progress.line("not shown on a terminal")
    assert "not shown" not in stderr.getvalue()
    assert "verify [1]" in stderr.getvalue()
    assert stderr.getvalue().endswith(("\x1b[2K", "\r\x1b[1A\x1b[2K"))
    assert stdout.getvalue() == ""


def test_a_terminal_that_is_gone_ends_no_work(terminal: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stderr = terminal()

    def gone(_: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(stderr, "write", gone)
    done = []
    out = Output()
    with out.progress(2, "rolling back") as progress:
        progress.advance("one")
        done.append("one")
    out.check()
    assert done == ["one"]


def test_small_texts() -> None:
    assert [size(value) for value in (0, 999, 1000, 59_400, 336_361_138, 2_500_000_000)] == [
        "0 B", "999 B", "1 kB", "59 kB", "336 MB", "2.5 GB",
    ]  # fmt: skip
    assert (plural(1, "file"), plural(0, "file")) == ("1 file", "0 files")
    assert [joined(items) for items in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
    assert (cell(None), cell([]), cell(["a", "b"]), cell(0)) == ("-", "-", "a, b", "0")
    assert (render.meaning("PASSED"), render.meaning("modified"), render.meaning("x")) == ("ok", "error", "")
