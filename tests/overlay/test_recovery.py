from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import engine, hook
from deepinfer_cli.overlay.files import Owner, write_new
from deepinfer_cli.overlay.payload import Payload
from deepinfer_cli.overlay.recovery import pending
from tests.conftest import snapshot
from tests.overlay.conftest import Bench, Steps

MINE = b"# mine\n"


class Killed(BaseException):
    """Stands for SIGKILL: nothing is restored after it."""


@pytest.fixture
def crash(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], None]:
    """Runs a transaction and kills it before the first step with the given name."""
    restore = engine._restore
    monkeypatch.setattr(
        engine, "_restore", lambda work, error: None if isinstance(error, Killed) else restore(work, error)
    )

    def kill(_name: str) -> None:
        raise Killed

    def run(step: str, command: Callable[[], object]) -> None:
        steps.on(step, kill)
        with pytest.raises(Killed):
            command()
        steps.arm(None, None)

    return run


Crash = Callable[[str, Callable[[], object]], None]


def test_nothing_to_recover(bench: Bench) -> None:
    before = snapshot(bench.site)
    assert bench.recover().outcome == "nothing"
    assert snapshot(bench.site) == before


def test_install_is_undone_before_and_finished_after_the_last_file(bench: Bench, crash: Crash) -> None:
    before = snapshot(bench.site)
    crash("replace vllm/models", bench.install)
    journal = pending(bench.state_dir)
    assert journal is not None and journal.kind == "install"
    report = bench.recover()
    assert (report.outcome, report.kind) == ("undone", "install")
    assert snapshot(bench.site) == before
    crash("verify", bench.install)
    assert bench.recover().outcome == "finished"
    assert bench.inspect().state == "installed"
    assert bench.rollback().restored
    assert snapshot(bench.site) == before


def test_rollback_is_undone_or_finished_too(bench: Bench, crash: Crash) -> None:
    before = snapshot(bench.site)
    bench.install()
    applied = snapshot(bench.site)
    crash("replace vllm/deepinfer_sm80/ops", bench.rollback)
    assert bench.recover().outcome == "undone"
    assert snapshot(bench.site) == applied
    crash("folders", bench.rollback)
    assert bench.recover().outcome == "finished"
    assert snapshot(bench.site) == before


def test_the_next_command_recovers_by_itself(bench: Bench, crash: Crash) -> None:
    before = snapshot(bench.site)
    crash("replace", bench.install)
    bench.install()
    assert bench.inspect().state == "installed"
    crash("verify", bench.rollback)
    assert bench.rollback().nothing
    assert snapshot(bench.site) == before


def test_bytecode_and_temp_files_of_the_crash_go(bench: Bench, crash: Crash) -> None:
    before = snapshot(bench.site, ignore=())
    crash("replace vllm/models", bench.install)
    cache = bench.vllm.root / "deepinfer_sm80" / "__pycache__"
    cache.mkdir()
    (cache / "gate.cpython-312.pyc").write_bytes(b"x")
    assert bench.litter()
    bench.recover()
    assert snapshot(bench.site, ignore=()) == before


def test_edited_hooked_file_keeps_the_edit_without_a_dead_block(bench: Bench, crash: Crash) -> None:
    original = bench.vllm.cache_utils.read_bytes()
    crash("verify", bench.install)
    edited = bench.vllm.cache_utils.read_bytes() + MINE
    bench.vllm.cache_utils.write_bytes(edited)
    report = bench.recover()
    assert bench.vllm.cache_utils.read_bytes() == original + MINE == hook.strip(edited)
    assert sorted(Path(path).read_bytes() for path in report.copies) == sorted([original, edited])
    assert len(report.foreign) == 1
    assert bench.recover().outcome == "nothing"


def test_file_replaced_by_a_reinstall_after_the_crash(bench: Bench, crash: Crash) -> None:
    crash("verify", bench.install)
    bench.vllm.reinstall()
    newest = bench.vllm.snapshot()
    bench.recover()
    assert {path for path in newest if path.startswith("vllm/models")} <= set(bench.vllm.snapshot())
    assert bench.inspect().state == "not-installed"


def test_edit_of_a_forced_install_survives_a_crash_and_another_edit(bench: Bench, crash: Crash) -> None:
    mine = bench.vllm.cache_utils.read_bytes() + MINE
    bench.vllm.cache_utils.write_bytes(mine)
    crash("verify", lambda: bench.install(force=True))
    second = MINE * 2
    bench.vllm.cache_utils.write_bytes(second)
    bench.recover()
    assert bench.vllm.cache_utils.read_bytes() == second
    assert mine in bench.kept().values()


def test_deleted_file_comes_back(bench: Bench, crash: Crash) -> None:
    before = snapshot(bench.site)
    crash("verify", bench.install)
    bench.vllm.cache_utils.unlink()
    bench.recover()
    assert snapshot(bench.site) == before


def test_damaged_backup_is_named_and_the_rest_restored(
    bench: Bench, crash: Crash, fake_payload: Callable[..., Payload]
) -> None:
    bench.install(fake_payload("0.0.9"))
    before = snapshot(bench.vllm.root)
    crash("replace vllm/models", lambda: bench.install(fake_payload("0.1.0", extra={"new.py": ""})))
    (backup,) = bench.state_dir.glob("backups/*/before/vllm/deepinfer_sm80/__init__.py")
    good = backup.read_bytes()
    backup.write_bytes(b"rotten")
    with pytest.raises(FailedError) as caught:
        bench.recover()
    assert caught.value.code == "restore-failed"
    assert caught.value.paths == (f"vllm/deepinfer_sm80/__init__.py (backup: {backup})",)
    assert pending(bench.state_dir) is not None
    after = snapshot(bench.vllm.root)
    different = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert different == {"deepinfer_sm80/__init__.py"}
    # the cause removed, the same command ends it
    backup.write_bytes(good)
    assert bench.recover().outcome == "undone"
    assert pending(bench.state_dir) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 1}'])
def test_unreadable_journal_says_what_to_do(bench: Bench, content: str) -> None:
    bench.state_dir.mkdir()
    (bench.state_dir / "journal.json").write_text(content)
    with pytest.raises(FailedError) as caught:
        bench.recover()
    assert caught.value.code == "journal-unreadable"
    assert str(bench.state_dir / "backups") in (caught.value.hint or "")


def test_journal_that_leads_outside_is_refused(bench: Bench, crash: Crash, tmp_path: Path) -> None:
    crash("verify", bench.install)
    path = bench.state_dir / "journal.json"
    data = json.loads(path.read_text())
    data["operations"][0]["path"] = "../../outside.py"
    path.write_text(json.dumps(data))
    with pytest.raises(FailedError) as caught:
        bench.recover()
    assert caught.value.code == "journal-unreadable"


def test_orphaned_backups_are_cleaned(bench: Bench) -> None:
    bench.install()
    orphan = bench.state_dir / "backups" / "0123" / "vllm" / "x.py"
    orphan.parent.mkdir(parents=True)
    write_new(orphan, b"x", Owner(0o600, orphan.parent.stat().st_uid, orphan.parent.stat().st_gid))
    bench.recover()
    assert not orphan.parent.parent.exists()
    assert bench.inspect().state == "installed"


@pytest.mark.parametrize("then", ["reinstalled", "uninstalled"])
@pytest.mark.parametrize("killed", ["upgrade", "rollback"])
def test_a_command_killed_before_its_backups_and_a_vllm_that_changed(
    bench: Bench, crash: Crash, fake_payload: Callable[..., Payload], killed: str, then: str
) -> None:
    """The hooked file is not what the journal knows and has no backup: it was never ours to restore."""
    bench.install()
    upgrade = fake_payload("0.2.0", extra={"ops/new.py": "x = 1\n"})
    crash("backup", bench.rollback if killed == "rollback" else lambda: bench.install(upgrade))
    if then == "reinstalled":
        bench.vllm.reinstall()
    else:
        bench.vllm.cache_utils.unlink()
    plain = bench.vllm.cache_utils.read_bytes() if then == "reinstalled" else None
    report = bench.recover()
    assert f"vllm/{bench.vllm.cache_utils.relative_to(bench.vllm.root).as_posix()}" in report.foreign
    assert pending(bench.state_dir) is None
    bench.rollback()
    assert not (bench.vllm.root / "deepinfer_sm80").exists()
    assert plain is None or bench.vllm.cache_utils.read_bytes() == plain


def test_an_edit_after_an_upgrade_killed_before_its_backups(
    bench: Bench, crash: Crash, fake_payload: Callable[..., Payload]
) -> None:
    """Nothing was touched yet, so no hook may go: there is no backup to put it back from."""
    bench.install()
    gate = bench.vllm.root / "deepinfer_sm80" / "gate.py"
    hooked = bench.vllm.cache_utils.read_bytes()
    crash("backup", lambda: bench.install(fake_payload("0.2.0", extra={"gate.py": "y = 2\n"})))
    gate.write_bytes(MINE)
    bench.recover()
    assert (bench.vllm.cache_utils.read_bytes(), gate.read_bytes()) == (hooked, MINE)
