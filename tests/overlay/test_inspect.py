from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.detect.vllm import Target, TargetKind
from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import hook, inspect, site
from deepinfer_cli.overlay.inspect import Inspection
from deepinfer_cli.overlay.site import FileState
from tests.conftest import FakeVllm, snapshot
from tests.overlay.conftest import Bench

MINE = b"# mine\n"


def _states(found: Inspection, owner: str) -> set[FileState]:
    return {each.state for each in found.files if each.owner == owner}


def test_not_installed_and_nothing_written(bench: Bench) -> None:
    before = snapshot(bench.site, ignore=())
    assert bench.inspect() == Inspection("not-installed")
    assert snapshot(bench.site, ignore=()) == before


def test_installed(bench: Bench) -> None:
    record = bench.install()
    before = snapshot(bench.site, ignore=())
    found = bench.inspect()
    assert found.state == "installed"
    assert found.record == record
    assert {each.state for each in found.files} == {FileState.APPLIED}
    assert [each.path for each in found.files] == [entry.path for entry in record.files]
    assert (found.overlay_version, found.payload_digest) == ("0.1.0", bench.payload.digest)
    assert not found.notes
    assert snapshot(bench.site, ignore=()) == before


def test_recorded_state_needs_no_origin(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.install()
    target = bench.target

    def refuse(target: Target) -> None:
        raise AssertionError("RECORD was read")

    monkeypatch.setattr(site.Origin, "of", refuse)
    assert inspect.inspect(target).state == "installed"


def test_modified_files(bench: Bench) -> None:
    bench.install()
    gate = bench.vllm.root / "deepinfer_sm80" / "gate.py"
    gate.write_bytes(MINE)
    bench.vllm.cache_utils.write_bytes(bench.vllm.cache_utils.read_bytes() + MINE)
    found = bench.inspect()
    assert found.state == "modified"
    assert _states(found, "hook") == {FileState.MODIFIED}
    assert _states(found, "payload") == {FileState.MODIFIED, FileState.APPLIED}
    assert found.payload_digest != bench.payload.digest


def test_missing_payload_file(bench: Bench) -> None:
    bench.install()
    (bench.vllm.root / "deepinfer_sm80" / "gate.py").unlink()
    found = bench.inspect()
    assert found.state == "modified"
    assert FileState.MISSING in _states(found, "payload")


def test_extra_file_is_noted(bench: Bench) -> None:
    bench.install()
    (bench.vllm.root / "deepinfer_sm80" / "notes.txt").write_bytes(MINE)
    assert bench.inspect().notes == ("vllm/deepinfer_sm80/notes.txt is not DeepInfer's",)


def test_reinstalled_vllm_is_stale(bench: Bench) -> None:
    bench.install()
    bench.vllm.reinstall()
    found = bench.inspect()
    assert found.state == "stale"
    assert _states(found, "hook") == {FileState.PRISTINE}


def test_upgraded_vllm_is_stale(bench: Bench) -> None:
    bench.install()
    bench.vllm.reinstall("0.34.0")
    bench.vllm.cache_utils.write_bytes(bench.vllm.cache_utils.read_bytes() + b"NEW = 1\n")
    found = bench.inspect()
    assert found.state == "stale"
    assert _states(found, "hook") == {FileState.STALE}
    assert "installed into vLLM 0.33.0, found 0.34.0" in found.notes


@pytest.mark.usefixtures("bundled")
def test_unrecorded(bench: Bench) -> None:
    bench.install()
    shutil.rmtree(bench.state_dir)
    found = bench.inspect()
    assert found.state == "unrecorded"
    assert found.record is None
    assert (found.overlay_version, found.payload_digest) == ("0.1.0", bench.payload.digest)
    assert len(found.files) == len(bench.payload.files) + 1


@pytest.mark.usefixtures("bundled")
def test_unrecorded_parts_are_told_apart(bench: Bench) -> None:
    bench.install()
    shutil.rmtree(bench.state_dir)
    original = bench.vllm.cache_utils.read_bytes()
    bench.vllm.cache_utils.write_bytes(hook.strip(original))
    assert "no file of vLLM is hooked" in bench.inspect().notes[0]
    bench.vllm.cache_utils.write_bytes(original)
    shutil.rmtree(bench.vllm.root / "deepinfer_sm80")
    found = bench.inspect()
    assert "cannot be imported" in found.notes[0]
    assert found.state == "modified", "vLLM does not start"
    assert bench.rollback().restored and bench.inspect().state == "not-installed"


@pytest.mark.usefixtures("bundled")
def test_an_edited_block_without_a_record_is_modified(bench: Bench) -> None:
    bench.install()
    shutil.rmtree(bench.state_dir)
    path = bench.vllm.cache_utils
    path.write_bytes(path.read_bytes().replace(b"(__name__)\n", b"(__name__)\nMINE = 1\n"))
    found = bench.inspect()
    assert found.state == "modified"
    assert [each.path for each in found.files if each.state is FileState.MODIFIED] == [
        path.relative_to(bench.site).as_posix()
    ]


@pytest.mark.usefixtures("bundled")
def test_a_name_that_is_no_text_is_only_a_name(bench: Bench) -> None:
    bench.install()
    shutil.rmtree(bench.state_dir)
    (bench.vllm.root / "deepinfer_sm80" / os.fsdecode(b"\xff.py")).write_bytes(b"")
    assert bench.inspect().state == "unrecorded"


@pytest.mark.usefixtures("bundled")
def test_skip_is_read_from_the_hooks(bench: Bench) -> None:
    bench.install()
    shutil.rmtree(bench.state_dir)
    bench.vllm.cache_utils.write_bytes(hook.append(bench.vllm.cache_utils.read_bytes(), ("combine",)))
    assert bench.inspect().skip == ("combine",)


def test_interrupted(bench: Bench) -> None:
    bench.install()
    (bench.state_dir / "journal.json").write_text("whatever")
    found = bench.inspect()
    assert found.state == "interrupted" and found.journal
    assert "recover first" in found.notes[-1]


def test_interrupted_first_install(bench: Bench) -> None:
    bench.state_dir.mkdir()
    (bench.state_dir / "journal.json").write_text("whatever")
    assert bench.inspect().state == "interrupted"


def test_leftover(bench: Bench) -> None:
    bench.install()
    for path in bench.vllm.root.iterdir():
        if path.is_file():
            path.unlink()
    shutil.rmtree(bench.vllm.root / "models")
    target = Target(TargetKind.TREE, bench.vllm.root)
    assert inspect.inspect(target).state == "leftover"
    shutil.rmtree(bench.site / ".deepinfer")
    assert inspect.inspect(target).state == "leftover"


def test_unreadable_record(bench: Bench) -> None:
    bench.install()
    (bench.state_dir / "record.json").write_text("{")
    with pytest.raises(FailedError):
        bench.inspect()


def test_hooks_are_found_at_the_end_and_anywhere(bench: Bench) -> None:
    path = bench.vllm.root / "models" / "long.py"
    path.write_bytes(hook.append(b"x = 1\n" * 10_000))
    (bench.vllm.root / "models" / "other.py").write_bytes(hook.append(b"") + b"y = 1\n" * 10_000)
    (bench.vllm.root / "models" / "__pycache__").mkdir()
    (bench.vllm.root / "models" / "__pycache__" / "x.py").write_bytes(hook.append(b""))
    tail = [path for path, _ in site.hooked_files(bench.site, tail_bytes=16 * 1024)]
    assert tail == ["vllm/models/long.py"]
    assert [path for path, _ in site.hooked_files(bench.site)] == [*tail, "vllm/models/other.py"]


def test_checkout_that_moved_on_with_its_hooks(
    bench: Bench, fake_vllm: Callable[..., FakeVllm], tmp_path: Path
) -> None:
    """`git pull` leaves edited files in place when upstream did not change them: they are as installed."""
    from tests.conftest import git

    bench.vllm = fake_vllm(tmp_path / "checkout", checkout=True)
    before = bench.vllm.cache_utils.read_bytes()
    bench.install()
    (bench.vllm.root / "_version.py").write_text("__version__ = version = '0.33.1'\n")
    git(bench.site, "commit", "-q", "-m", "Next", "vllm/_version.py")
    assert bench.inspect().state == "installed"
    bench.rollback()
    assert bench.vllm.cache_utils.read_bytes() == before
    assert git(bench.site, "status", "--porcelain").stdout == ""
