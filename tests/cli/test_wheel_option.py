"""`install --wheel --into`: how a release may be written, and what a dry run checks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from deepinfer_cli.detect import wheel
from tests.cli.conftest import Cli
from tests.conftest import FakeVllm
from tests.fakes import rewrite


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


@pytest.mark.parametrize("why", ["unsupported", "declined"])
def test_what_is_refused_or_declined_leaves_no_tree(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(wheel, "cached_tree", lambda version, **_: fake.root)
    if why == "unsupported":
        rewrite(fake.cache_utils, "def gather_cache", "def gather_them")
    into = tmp_path / "trees" / "new"
    yes = ["--yes"] if why == "unsupported" else []
    run = cli("install", "--wheel", "0.33.0", "--into", into, "--arch", "sm80", *yes)
    assert run.code != 0
    assert ("confirmation-required" in run.err) == (why == "declined")
    assert not into.parent.exists()


def test_a_full_disk_under_the_tree_is_one_short_error(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheel, "cached_tree", lambda version, **_: fake.root)
    monkeypatch.setattr(wheel.shutil, "copyfile", full)
    into = tmp_path / "new"
    run = cli("install", "--wheel", "0.33.0", "--into", into, "--arch", "sm80", "--yes")
    assert run.code == 1
    assert run.err.splitlines()[-3:-1] == [
        "error[no-space]: no space to write: No space left on device",
        f"  {into}",
    ]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".new", "new"))] == []


@pytest.mark.parametrize("exists", [False, True])
def test_what_a_killed_run_left_goes_with_the_next(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    monkeypatch.setattr(wheel, "cached_tree", lambda version, **_: fake.root)
    into = tmp_path / "trees" / "new"
    (into if exists else into.parent).mkdir(parents=True)
    arguments = ["install", "--wheel", "0.33.0", "--into", into, "--arch", "sm80", "--yes"]
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(wheel.shutil, "copyfile", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        cli(*arguments)
        os._exit(1)
    os.waitpid(child, 0)
    folder = into if exists else into.parent
    assert len(list(folder.iterdir())) == 1
    # one at work is left alone
    busy = folder / ".new.deepinfer-aaaaaaaa"
    busy.mkdir()
    held = os.open(busy, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cli(*arguments).code == 0
        assert busy.exists()
    finally:
        os.close(held)
    assert list(folder.glob(".new.*")) == [busy]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_tree_is_copied_leaves_nothing(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)

    handler = signal.signal(number, lambda *_: None)
    try:
        monkeypatch.setattr(wheel, "cached_tree", lambda version, **_: fake.root)
        monkeypatch.setattr(wheel, "_copy", die)
        into = tmp_path / "trees" / "new"
        assert cli("install", "--wheel", "0.33.0", "--into", into, "--arch", "sm80", "--yes").code == 130
        assert list(into.parent.iterdir()) == []
    finally:
        signal.signal(number, handler)
