"""`-o FILE`: one way everywhere, and what is said before a check that cannot run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deepinfer_cli import outfile
from deepinfer_cli.errors import FailedError, Interruption, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.result import Result
from tests.cli.conftest import Cli, install_into
from tests.conftest import FakeVllm

# this Python has no CUDA GPU, or the level finds no overlay: neither can run
CANNOT_RUN = [("--e2e",), ("--level", "live")]


@pytest.mark.parametrize("arguments", CANNOT_RUN)
def test_the_document_of_a_check_that_cannot_run_is_written(
    cli: Cli, fake: FakeVllm, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    file = tmp_path / "new" / "folder" / "x.json"
    words = ["verify", *arguments, "--target", fake.site, "--python", sys.executable]
    run = cli(*words, "--json", "--output", file)
    assert run.code == 3
    assert run.document["errors"][0]["code"] == "nothing-runnable"
    written, shown = json.loads(file.read_text()), run.document
    for document in (written, shown):
        for name in ("duration_s", "seconds"):
            document["data"].pop(name, None)
    assert written == shown


def test_a_finished_transaction_that_is_missing_is_an_error_document_too(
    cli: Cli, fake: FakeVllm, tmp_path: Path
) -> None:
    (fake.site / ".deepinfer").mkdir()
    (fake.site / ".deepinfer" / "journal.json").write_text("{")
    file = tmp_path / "x.json"
    assert cli("verify", "--target", fake.site, "-o", file).code == 1
    assert json.loads(file.read_text())["errors"][0]["code"] == "journal-unreadable"


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "--level", "nosuch"),
        ("verify", "--e2e", "--suite", "full"),
        ("verify", "nosuch", "--level", "compile"),
        ("bench", "nosuch"),
        ("bench", "--provider", "nosuch"),
        ("export", "patch", "--arch", "sm90"),
    ],
)
def test_a_wrong_command_line_writes_nothing(
    cli: Cli, fake: FakeVllm, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    folder = tmp_path / "new"
    assert cli(*arguments, "--target", fake.site, "--output", folder / "x.json").code == 2
    assert not folder.exists()


def _raises(error: Exception) -> Result:
    raise error


@pytest.mark.parametrize(
    ("error", "written"),
    [
        (FailedError("x", code="x"), True),
        (UsageError("x", code="usage"), False),
        (Interruption("x", code="interrupted"), False),
    ],
)
def test_which_errors_are_written(tmp_path: Path, error: Exception, written: bool) -> None:
    file = tmp_path / "x.json"
    file.write_text("before")
    with pytest.raises(type(error)):
        outfile.document(file, "verify", lambda: _raises(error), Output(quiet=True))
    assert (file.read_text() != "before") == written


def test_hints_in_the_file_are_those_that_are_shown(cli: Cli, fake: FakeVllm, tmp_path: Path) -> None:
    cli("verify", "--e2e", "--target", fake.site, "-o", tmp_path / "x.json")
    (error,) = json.loads((tmp_path / "x.json").read_text())["errors"]
    assert error["hint"] == f"deepinfer install --target {fake.site} --arch sm80"


@pytest.mark.parametrize("arguments", [("--e2e",), ("--level", "static"), ("--level", "live")])
def test_no_kernel_is_said_to_be_checked_where_none_is(
    cli: Cli, fake: FakeVllm, arguments: tuple[str, ...]
) -> None:
    run = cli("verify", *arguments, "--target", fake.site, "--python", sys.executable)
    assert "the bundled one" not in run.err
    if arguments != ("--level", "live"):
        assert "kernels run in" not in run.err


def test_kernels_of_the_bundled_overlay_are_said_to_be_checked(cli: Cli, fake: FakeVllm) -> None:
    run = cli("verify", "--level", "numerics", "--target", fake.site, "--python", sys.executable)
    assert "kernels are checked from the bundled one" in run.err and "kernels run in" in run.err
    install_into(cli, fake)
    run = cli("verify", "--level", "numerics", "--target", fake.site, "--python", sys.executable)
    assert "the bundled one" not in run.err
