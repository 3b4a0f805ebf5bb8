"""`install --wheel --into`: how a release may be written, and what a dry run checks."""

from __future__ import annotations

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
