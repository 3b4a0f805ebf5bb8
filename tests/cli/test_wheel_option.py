"""`install --wheel --into`: how a release may be written, and what a dry run checks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from deepinfer_cli.detect import wheel
from tests.cli.conftest import Cli
from tests.conftest import FakeVllm


def test_a_shorter_way_to_write_the_release_is_the_same(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "cached_tree", lambda version, **_: fake.root)
    arguments = ["install", "--wheel", "0.33", "--into", tmp_path / "tree", "--arch", "sm80", "--yes"]
    assert cli(*arguments).code == 0
    second = cli(*arguments)
    assert (second.code, second.out.startswith("already installed")) == (0, True)


def test_a_dry_run_refuses_the_folder_that_an_install_would_refuse(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    run = cli("install", "--wheel", "0.33.0", "--into", tmp_path, "--arch", "sm80", "--dry-run")
    assert run.code == 4
    assert "error[into-not-empty]" in run.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_tree_is_copied_leaves_nothing(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)

    handler = signal.signal(number, lambda *_: None)
    try:
        monkeypatch.setattr(wheel, "cached_tree", lambda version, **_: fake.root)
        monkeypatch.setattr(wheel.shutil, "copytree", die)
        into = tmp_path / "trees" / "new"
        assert cli("install", "--wheel", "0.33.0", "--into", into, "--arch", "sm80", "--yes").code == 130
        assert list(into.parent.iterdir()) == []
    finally:
        signal.signal(number, handler)
