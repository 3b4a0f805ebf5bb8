from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.errors import FailedError, RefusedError, UnsupportedError
from deepinfer_cli.overlay import hook, state
from deepinfer_cli.overlay.payload import Payload
from deepinfer_cli.overlay.record import read_record
from deepinfer_cli.overlay.transaction import apply_install
from tests.conftest import FakeVllm, snapshot
from tests.overlay.conftest import Bench, Steps
from tests.overlay.test_state import refuse_unnamed

Payloads = Callable[..., Payload]


def test_install_writes_payload_hook_and_record(bench: Bench) -> None:
    original = bench.vllm.cache_utils.read_bytes()
    record = bench.install()
    assert bench.vllm.cache_utils.read_bytes() == hook.append(original)
    for name in bench.payload.files:
        assert (bench.vllm.root / "deepinfer_sm80" / name).read_bytes() == bench.payload.read(name)
    assert read_record(bench.state_dir) == record
    entry = record.entry(bench.vllm.cache_utils.relative_to(bench.site).as_posix())
    assert entry and entry.backup
    assert (bench.state_dir / entry.backup).read_bytes() == original
    assert sorted(path.name for path in bench.state_dir.iterdir()) == ["backups", "lock", "record.json"]
    assert not bench.litter()


def test_second_install_changes_nothing(bench: Bench) -> None:
    record = bench.install()
    before = snapshot(bench.site)
    assert bench.install() == record
    assert snapshot(bench.site) == before


def test_payload_comes_first_and_hooks_last(bench: Bench, steps: Steps) -> None:
    bench.install()
    replaced = [name for name in steps.names if name.startswith("replace ")]
    hooks = ["deepinfer_sm80/" not in name for name in replaced]
    assert hooks == sorted(hooks)
    assert any(hooks) and not all(hooks)
    assert steps.names[0] == "journal"
    assert steps.names[-4:] == ["folders", "record", "commit", "clean"]
    order = [
        steps.names.index(next(x for x in steps.names if x.startswith(kind))) for kind in ("backup", "stage")
    ]
    assert order == sorted(order)


def test_steps_are_reported_with_their_number(bench: Bench) -> None:
    seen: list[tuple[str, int, int]] = []
    apply_install(bench.plan(), archs=("sm80",), on_step=lambda *step: seen.append(step))
    assert [number for _, number, _ in seen] == list(range(1, seen[0][2] + 1))


def test_journal_and_backups_are_on_disk_before_the_first_file(
    bench: Bench, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
    )
    seen: dict[str, list[str]] = {}
    steps.on("backup", lambda name: seen.setdefault("backup", list(synced)))
    bench.install()
    assert seen["backup"][-2:] == [str(bench.state_dir / "journal.json.tmp"), str(bench.state_dir)]
    backup = next((bench.state_dir / "backups").rglob("cache_utils.py"))
    files = [path for path in synced if path.startswith(str(bench.vllm.root)) and "deepinfer-tmp" in path]
    assert len(files) == len(bench.payload.files) + 1
    folder = synced.index(str(bench.vllm.root / "deepinfer_sm80"))
    for before in (str(backup), str(backup.parent), *files):
        assert synced.index(before) < folder
    assert synced.index(str(bench.state_dir / "record.json.tmp")) > folder
    assert synced[-1] == str(bench.state_dir.parent) or synced[-1] == str(bench.state_dir)


def test_file_edited_after_the_plan_is_refused(bench: Bench) -> None:
    plan = bench.plan()
    with bench.vllm.cache_utils.open("a") as file:
        file.write("# mine\n")
    before = snapshot(bench.site)
    with pytest.raises(RefusedError) as caught:
        apply_install(plan, archs=("sm80",))
    assert caught.value.code == "file-changed"
    assert snapshot(bench.site) == before


@pytest.mark.parametrize("at", ["backup", "stage", "replace vllm/models"])
def test_file_edited_while_installing_is_refused_and_kept(bench: Bench, steps: Steps, at: str) -> None:
    before = snapshot(bench.site)
    mine = bench.vllm.cache_utils.read_bytes() + b"# mine\n"
    bench.install()
    number = next(k for k, name in enumerate(steps.names) if name.startswith(at))
    bench.rollback()

    steps.arm(number, lambda name: bench.vllm.cache_utils.write_bytes(mine) and None)
    with pytest.raises(RefusedError):
        bench.install()
    assert bench.vllm.cache_utils.read_bytes() == mine
    after = snapshot(bench.site, ignore=("__pycache__",))
    assert {path for path in before.keys() ^ after.keys() if not path.startswith(".deepinfer-kept")} == set()
    assert not bench.litter()


def test_existing_file_where_a_new_one_goes_is_refused(bench: Bench) -> None:
    plan = bench.plan()
    (bench.vllm.root / "deepinfer_sm80").mkdir()
    (bench.vllm.root / "deepinfer_sm80" / "gate.py").write_text("mine\n")
    before = snapshot(bench.site)
    with pytest.raises(RefusedError):
        apply_install(plan, archs=("sm80",))
    assert snapshot(bench.site) == before


def test_hard_link_peer_and_its_inode_stay(bench: Bench, tmp_path: Path) -> None:
    peer = tmp_path / "cache.py"
    os.link(bench.vllm.cache_utils, peer)
    before, inode = peer.read_bytes(), peer.stat().st_ino
    bench.install()
    assert peer.read_bytes() == before
    assert peer.stat().st_ino == inode != bench.vllm.cache_utils.stat().st_ino
    bench.rollback()
    assert peer.read_bytes() == before == bench.vllm.cache_utils.read_bytes()
    assert bench.vllm.cache_utils.stat().st_ino != inode


def test_mode_and_owner_are_kept(bench: Bench) -> None:
    file = bench.vllm.cache_utils
    file.chmod(0o640)
    owner = (1234, 4321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(file, *owner)
    bench.install()
    for _ in range(2):
        found = file.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, *owner)
        bench.rollback()


def test_new_files_are_readable_whatever_the_umask(bench: Bench) -> None:
    before = os.umask(0o077)
    try:
        bench.install()
    finally:
        os.umask(before)
    for path in (bench.vllm.root / "deepinfer_sm80").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644)
    assert stat.S_IMODE(bench.state_dir.stat().st_mode) == 0o755


def test_symlinked_file_is_refused(bench: Bench, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.py"
    bench.vllm.cache_utils.rename(elsewhere)
    bench.vllm.cache_utils.symlink_to(elsewhere)
    before, content = snapshot(bench.site), elsewhere.read_bytes()
    with pytest.raises(RefusedError) as caught:
        bench.install()
    assert caught.value.code == "symlinked-file"
    assert snapshot(bench.site) == before
    assert elsewhere.read_bytes() == content


def test_bytecode_of_touched_files_is_purged(bench: Bench) -> None:
    cache = bench.vllm.cache_utils.parent / "__pycache__"
    cache.mkdir()
    stale = cache / "cache_utils.cpython-312.pyc"
    other = cache / "cache_utils_more.cpython-312.pyc"
    for path in (stale, other, cache / "cache_utils.cpython-312.opt-1.pyc"):
        path.write_bytes(b"old")
    bench.install()
    assert list(cache.iterdir()) == [other]
    stale.write_bytes(b"old")
    bench.rollback()
    assert list(cache.iterdir()) == [other]


def test_mtime_is_never_preserved(bench: Bench) -> None:
    os.utime(bench.vllm.cache_utils, (1, 1))
    bench.install()
    bench.rollback()
    assert bench.vllm.cache_utils.stat().st_mtime > 1


def test_payload_that_does_not_compile_is_refused(bench: Bench, fake_payload: Payloads) -> None:
    before = snapshot(bench.site)
    with pytest.raises(FailedError) as caught:
        bench.install(fake_payload(extra={"broken.py": "def (:\n"}))
    assert caught.value.code == "compile-failed"
    assert snapshot(bench.site) == before
    assert not list(bench.site.rglob("__pycache__"))


def test_paths_with_spaces_and_other_letters(
    bench: Bench, fake_vllm: Callable[..., FakeVllm], tmp_path: Path
) -> None:
    bench.vllm = fake_vllm(tmp_path / "mein Ordner ünï 模型" / "site-packages")
    before = snapshot(bench.site)
    bench.install()
    assert bench.inspect().state == "installed"
    bench.rollback()
    assert snapshot(bench.site) == before


def test_checkout_keeps_its_state_in_the_git_folder(
    bench: Bench, fake_vllm: Callable[..., FakeVllm], tmp_path: Path
) -> None:
    bench.vllm = fake_vllm(tmp_path / "checkout", checkout=True)
    before = bench.vllm.snapshot()
    bench.install()
    assert (bench.site / ".git" / "deepinfer" / "record.json").is_file()
    assert not (bench.site / ".deepinfer").exists()
    bench.rollback()
    assert bench.vllm.snapshot() == before
    assert not (bench.site / ".git" / "deepinfer").exists()


def test_upgrade_keeps_the_first_backup_and_removes_old_files(bench: Bench, fake_payload: Payloads) -> None:
    before = snapshot(bench.site)
    first = bench.install(
        fake_payload("0.0.9", extra={"ops/gone/__init__.py": "", "ops/gone/deep.py": "x = 1\n"})
    )
    second = bench.install(fake_payload("0.1.0", extra={"ops/fresh/__init__.py": ""}))
    assert second.overlay_version == "0.1.0"
    hooks = [[entry for entry in record.files if entry.owner == "hook"] for record in (first, second)]
    assert hooks[0] == hooks[1]
    assert not (bench.vllm.root / "deepinfer_sm80" / "ops" / "gone").exists()
    assert [path.name for path in (bench.state_dir / "backups").iterdir()] == [first.transaction_id]
    assert bench.inspect().state == "installed"
    bench.rollback()
    assert snapshot(bench.site) == before


def test_upgrade_takes_hooks_out_while_the_payload_is_mixed(
    bench: Bench, fake_payload: Payloads, steps: Steps
) -> None:
    bench.install(fake_payload("0.0.9"))
    blocks: list[bool] = []
    steps.on(
        "replace vllm/deepinfer_sm80",
        lambda name: blocks.append(hook.find(bench.vllm.cache_utils.read_bytes())),
    )
    bench.install(fake_payload("0.1.0"))
    assert blocks and not any(blocks)
    assert hook.find(bench.vllm.cache_utils.read_bytes())


def test_forced_install_keeps_a_copy_and_rolls_back_to_the_edit(bench: Bench) -> None:
    mine = bench.vllm.cache_utils.read_bytes() + b"# mine\n"
    bench.vllm.cache_utils.write_bytes(mine)
    before = snapshot(bench.site)
    with pytest.raises(RefusedError):
        bench.install()
    assert snapshot(bench.site) == before
    record = bench.install(force=True)
    assert [Path(path).read_bytes() for path in record.kept] == [mine]
    assert bench.vllm.cache_utils.read_bytes() == hook.append(mine)
    bench.rollback()
    assert bench.vllm.cache_utils.read_bytes() == mine
    assert list(bench.kept().values()) == [mine]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_installs_belongs_to_the_owner_of_vllm(bench: Bench) -> None:
    owner = (1234, 4321)
    for path in (bench.site, *bench.site.rglob("*")):
        os.chown(path, *owner)
    bench.install()
    assert (bench.state_dir / "lock").exists() and (bench.state_dir / "record.json").exists()
    assert {(path.stat().st_uid, path.stat().st_gid) for path in bench.site.rglob("*")} == {owner}


def test_an_edit_inside_our_block_is_refused_and_force_keeps_a_copy(bench: Bench) -> None:
    bench.install()
    edited = bench.vllm.cache_utils.read_bytes().replace(b"(__name__)\n", b"(__name__)\nMINE = 1\n")
    bench.vllm.cache_utils.write_bytes(edited)
    with pytest.raises(RefusedError):
        bench.install()
    assert bench.vllm.cache_utils.read_bytes() == edited
    record = bench.install(force=True)
    assert list(bench.kept().values()) == [edited]
    assert [Path(path).read_bytes() for path in record.kept] == [edited]
    assert bench.inspect().state == "installed"


def test_force_over_an_edited_payload_file_keeps_a_copy(bench: Bench) -> None:
    bench.install()
    gate = bench.vllm.root / "deepinfer_sm80" / "gate.py"
    gate.write_bytes(b"# mine\n")
    record = bench.install(force=True)
    assert [Path(path).read_bytes() for path in record.kept] == [b"# mine\n"]
    assert gate.read_bytes() == bench.payload.read("gate.py")


@pytest.mark.usefixtures("bundled")
def test_unrecorded_overlay_is_adopted(bench: Bench) -> None:
    before = snapshot(bench.site)
    bench.install()
    for path in sorted(bench.state_dir.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert bench.inspect().state == "unrecorded"
    record = bench.install()
    assert record.adopted
    assert bench.inspect().state == "installed"
    bench.rollback()
    assert snapshot(bench.site) == before


def test_an_unfinished_transaction_comes_first(bench: Bench) -> None:
    plan = bench.plan()
    bench.state_dir.mkdir()
    (bench.state_dir / "journal.json").write_text("{}")
    with pytest.raises(FailedError) as caught:
        apply_install(plan, archs=("sm80",))
    assert caught.value.code == "journal-unreadable"


class Planted(BaseException):
    """Stands for any exception, also one that is no Exception."""


def _raise(error: BaseException) -> Callable[[str], None]:
    def action(_name: str) -> None:
        raise error

    return action


def _sigterm(_name: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


FAULTS = {
    "exception": (_raise(Planted()), Planted),
    "interrupt": (_raise(KeyboardInterrupt()), KeyboardInterrupt),
    "full-disk": (_raise(OSError(28, "No space left on device")), FailedError),
    "sigterm": (_sigterm, KeyboardInterrupt),
}


def scenario(name: str, bench: Bench, fake_payload: Payloads) -> Callable[[], object]:
    """Prepare one scenario; what is returned is the transaction under test."""
    if name == "install":
        return bench.install
    if name == "upgrade":
        bench.install(fake_payload("0.0.9", extra={"ops/gone/__init__.py": "x = 1\n"}))
        return lambda: bench.install(fake_payload("0.1.0", extra={"ops/fresh.py": ""}))
    if name == "forced install":
        bench.vllm.cache_utils.write_bytes(bench.vllm.cache_utils.read_bytes() + b"# mine\n")
        return lambda: bench.install(force=True)
    bench.install()
    if name == "rollback":
        return bench.rollback
    with bench.vllm.cache_utils.open("ab") as file:
        file.write(b"# mine\n")
    (bench.vllm.root / "deepinfer_sm80" / "gate.py").write_bytes(b"# mine too\n")
    return lambda: bench.rollback(force=True)


SCENARIOS = ("install", "upgrade", "forced install", "rollback", "forced rollback")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_fault_at_every_step_restores(
    bench: Bench, steps: Steps, fake_payload: Payloads, name: str, fault: str
) -> None:
    action, expected = FAULTS[fault]
    run = scenario(name, bench, fake_payload)
    before, lock_there = snapshot(bench.site), (bench.state_dir / "lock").exists()
    number = 0
    while True:
        steps.arm(number, action)
        try:
            run()
        except expected:
            pass
        else:
            break
        if steps.names[-1] == "clean":
            # after the commit: done, and only the leftovers of the state folder are still to go
            break
        assert (bench.state_dir / "lock").exists() == lock_there
        assert snapshot(bench.site) == before, steps.names[-1]
        assert not bench.litter()
        number += 1
    assert number >= len(steps.names) - 2 > 15
    assert not (bench.state_dir / "journal.json").exists()
    assert bench.inspect().state == ("not-installed" if "rollback" in name else "installed")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_failed_restore_is_named_and_the_others_go_on(
    bench: Bench, steps: Steps, fake_payload: Payloads
) -> None:
    bench.install(fake_payload("0.0.9"))

    def spoil(name: str) -> None:
        for backup in bench.state_dir.rglob("before/**/__init__.py"):
            if backup.parent.name == "deepinfer_sm80":
                backup.write_bytes(b"rotten")
        raise Planted

    before = snapshot(bench.vllm.root)
    steps.on("verify", spoil)
    with pytest.raises(FailedError) as caught:
        bench.install(fake_payload("0.1.0"))
    assert caught.value.code == "restore-failed"
    (line,) = caught.value.paths
    assert line.startswith("vllm/deepinfer_sm80/__init__.py (backup: ")
    assert (bench.state_dir / "journal.json").exists()
    after = snapshot(bench.vllm.root)
    assert [path for path in before if before[path] != after.get(path)] == ["deepinfer_sm80/__init__.py"]


def test_no_space_is_told_before_the_first_write(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    monkeypatch.setattr(state, "free_bytes", lambda folder: 1000)
    before = snapshot(bench.site)
    with pytest.raises(FailedError) as caught:
        bench.install()
    assert caught.value.code == "no-space"
    assert snapshot(bench.site) == before
    assert not steps.names


def test_unwritable_folder_is_unsupported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_unnamed(monkeypatch, errno.EACCES)
    with pytest.raises(UnsupportedError) as caught:
        bench.install()
    assert caught.value.code == "read-only"
    assert "export docker" in (caught.value.hint or "")
    assert not bench.state_dir.exists()
