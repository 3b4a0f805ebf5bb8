from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

from deepinfer_cli.errors import FailedError, RefusedError, UnsupportedError
from deepinfer_cli.overlay import state
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.payload import Payload
from deepinfer_cli.overlay.signals import interruptible
from tests.conftest import FakeVllm, snapshot
from tests.overlay.conftest import Bench, Steps


def test_lock_and_folder_vanish_when_nothing_else_is_there(tmp_path: Path) -> None:
    folder = tmp_path / ".deepinfer"
    with state.lock(folder):
        assert (folder / "lock").read_text() == f"{os.getpid()}\n"
    assert list(tmp_path.iterdir()) == []


def test_lock_stays_with_a_record(tmp_path: Path) -> None:
    with state.lock(tmp_path):
        (tmp_path / "record.json").write_text("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "record.json"]
    with state.lock(tmp_path):
        pass


_HOLD = """
import sys, time
from pathlib import Path
from deepinfer_cli.overlay.state import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_held_lock_fails_at_once_and_names_the_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        started = time.monotonic()
        with pytest.raises(FailedError) as caught, state.lock(tmp_path):
            pass
        assert time.monotonic() - started < 0.5
        assert caught.value.code == "lock-held"
        assert f"process {child.pid}" in caught.value.message
        child.communicate("")
    with state.lock(tmp_path):
        pass


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        child.kill()
        child.wait()
    with state.lock(tmp_path):
        pass


def test_excludes_filelock_too(tmp_path: Path) -> None:
    with filelock.FileLock(tmp_path / "lock"), pytest.raises(FailedError), state.lock(tmp_path):
        pass


def test_waiting_for_a_lock_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    """Who opened the lock file before its holder deleted it must not believe to hold anything."""
    folder, inside, most = tmp_path / ".deepinfer", 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with state.lock(folder, timeout_s=30):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.0005)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert not folder.exists()


def test_lock_on_a_deleted_file_is_not_current(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        assert state._is_current(handle, path)
        path.unlink()
        assert not state._is_current(handle, path)
        path.write_text("")
        assert not state._is_current(handle, path)
    finally:
        os.close(handle)


def refuse_unnamed(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Opening a file without a name fails."""
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def test_preflight_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    state.preflight(tmp_path, tmp_path / ".deepinfer", {"vllm/a.py": 10, "vllm/new/deep/b.py": 10}, [10])
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"]
    assert list((tmp_path / "vllm").iterdir()) == []


def test_probe_by_name_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_unnamed(monkeypatch, errno.EOPNOTSUPP)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / ".deepinfer-probe").write_text("old")
    state.preflight(tmp_path, tmp_path / ".deepinfer", {"vllm/a.py": 10}, [])
    assert list((tmp_path / "vllm").iterdir()) == []


@pytest.mark.parametrize("link", ["vllm/models/x.py", "vllm/models"])
def test_links_below_vllm_are_refused(tmp_path: Path, link: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.py").write_text("")
    path = tmp_path / link
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere" / ("x.py" if link.endswith(".py") else ""))
    with pytest.raises(RefusedError) as caught:
        state.preflight(tmp_path, tmp_path / ".deepinfer", {"vllm/models/x.py": 1}, [])
    assert caught.value.code == "symlinked-file"
    assert caught.value.paths == (str(path),)


def test_linked_parent_of_vllm_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real" / "vllm").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    state.preflight(tmp_path / "link", tmp_path / "link" / ".deepinfer", {"vllm/x.py": 1}, [])


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A tmpfs on `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("NOT TESTED: there is no mount command, so neither a full disk nor a read-only one")
    if done.returncode:
        pytest.skip(f"NOT TESTED: full and read-only disks need the right to mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


Make = Callable[..., FakeVllm]


def _bench(make: Make, site: Path, manifest: Manifest, payload: Payload) -> Bench:
    return Bench(make(site), manifest, payload)


def test_read_only_filesystem(
    tmp_path: Path, fake_vllm: Make, fake_manifest: Manifest, fake_payload: Callable[..., Payload]
) -> None:
    with mounted(tmp_path / "disk") as disk:
        bench = _bench(fake_vllm, disk / "site", fake_manifest, fake_payload())
        before = snapshot(bench.site)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(UnsupportedError) as caught:
            bench.install()
        assert caught.value.code == "read-only"
        assert "export docker" in (caught.value.hint or "")
        assert snapshot(bench.site) == before
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        bench.install()
        installed = snapshot(bench.site)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(UnsupportedError):
            bench.rollback()
        assert bench.inspect().state == "installed"
        assert snapshot(bench.site) == installed


def _fill(disk: Path) -> Path:
    path = disk / "ballast"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return path


def test_small_disk_is_told_before_the_first_write(
    tmp_path: Path, fake_vllm: Make, fake_manifest: Manifest, fake_payload: Callable[..., Payload]
) -> None:
    with mounted(tmp_path / "disk", "-o", "size=256k") as disk:
        payload = fake_payload(extra={"big.txt": "x" * 200_000})
        bench = _bench(fake_vllm, disk / "site", fake_manifest, payload)
        before = snapshot(bench.site)
        with pytest.raises(FailedError) as caught:
            bench.install()
        assert caught.value.code == "no-space"
        assert snapshot(bench.site) == before


@pytest.mark.parametrize("step", ["journal", "backup", "stage", "replace", "record"])
@pytest.mark.parametrize("command", ["install", "upgrade", "rollback"])
def test_disk_fills_up_meanwhile(
    tmp_path: Path,
    fake_vllm: Make,
    fake_manifest: Manifest,
    fake_payload: Callable[..., Payload],
    steps: Steps,
    command: str,
    step: str,
) -> None:
    with mounted(tmp_path / "disk", "-o", "size=2m") as disk:
        bench = _bench(fake_vllm, disk / "site", fake_manifest, fake_payload("0.0.9"))
        if command != "install":
            bench.install()
        before = snapshot(bench.site)
        steps.on(step, lambda name: _fill(disk))
        try:
            bench.rollback() if command == "rollback" else bench.install(fake_payload("0.1.0"))
        except FailedError as error:
            assert error.code == "no-space"
            assert "free some space" in (error.hint or "")
            assert snapshot(bench.site) == before
        else:
            # nothing had to be written from there on
            assert (command, step) == ("rollback", "record") or step == "replace"
        assert not (bench.state_dir / "journal.json").exists()
        assert not bench.litter()


def test_file_size_limit(bench: Bench, fake_payload: Callable[..., Payload]) -> None:
    before = snapshot(bench.site)
    payload = fake_payload(extra={"big.txt": "x" * 100_000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(FailedError) as caught:
            bench.install(payload)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.code == "no-space"
    assert snapshot(bench.site) == before


def test_a_full_disk_under_the_lock_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FailedError) as caught, state.lock(tmp_path / ".deepinfer"):
        pass
    assert caught.value.code == "no-space"
    assert "free some space" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["_open", "_is_current", "_only_lock", "remove_dir"])
def test_a_signal_while_locking_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    plain = getattr(state, moment)

    def interrupted(*arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments)

    monkeypatch.setattr(state, moment, interrupted)
    with pytest.raises(KeyboardInterrupt), interruptible(), state.lock(tmp_path / ".deepinfer"):
        pass
    assert list(tmp_path.iterdir()) == []
