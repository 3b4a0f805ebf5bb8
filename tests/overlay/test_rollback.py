from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.detect.vllm import find_leftover
from deepinfer_cli.errors import FailedError, RefusedError
from deepinfer_cli.overlay import hook, manifest, patchfile, payload, rollback_plan
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.payload import Payload
from deepinfer_cli.overlay.recovery import recover
from deepinfer_cli.overlay.rollback import apply_rollback, plan_rollback
from tests.conftest import RELEASES, FakeVllm, git, snapshot, sources
from tests.overlay.conftest import Bench

MINE = b"# mine\n"


def _hook_path(bench: Bench) -> str:
    return bench.vllm.cache_utils.relative_to(bench.site).as_posix()


def _edit_record(bench: Bench, **values: object) -> None:
    path = bench.state_dir / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _forget(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the state folder; the bundled payload is the small one of these tests."""
    shutil.rmtree(bench.state_dir)
    monkeypatch.setattr(rollback_plan.payloads, "bundled", lambda: bench.payload)


def test_round_trip_and_twice(bench: Bench) -> None:
    before = snapshot(bench.site)
    bench.install()
    report = bench.rollback()
    assert report.restored == (_hook_path(bench),)
    assert len(report.removed) == len(bench.payload.files)
    assert not report.copies and not report.kept
    assert snapshot(bench.site) == before
    assert bench.rollback().nothing
    assert snapshot(bench.site) == before


def test_bytecode_in_our_folder_goes_with_it(bench: Bench) -> None:
    before = snapshot(bench.site, ignore=())
    bench.install()
    folder = bench.vllm.root / "deepinfer_sm80"
    for cache in (
        folder / "__pycache__",
        folder / "ops" / "__pycache__",
        folder / "__pycache__" / "__pycache__",
    ):
        cache.mkdir()
        (cache / "gate.cpython-312.pyc").write_bytes(b"x")
        (cache / "gate.cpython-312.pyc.140003").write_bytes(b"x")
    bench.rollback()
    assert snapshot(bench.site, ignore=()) == before


def test_a_users_file_in_our_folder_stays_and_is_reported(bench: Bench) -> None:
    bench.install()
    folder = bench.vllm.root / "deepinfer_sm80"
    mine = [folder / "notes.txt", folder / "ops" / "own.py", folder / "ops" / "__pycache__" / "notes.txt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(MINE)
    report = bench.rollback()
    assert sorted(report.kept) == sorted(map(str, mine))
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(mine)
    assert not bench.state_dir.exists()


def test_edited_files_are_refused_by_name(bench: Bench) -> None:
    bench.install()
    gate = bench.vllm.root / "deepinfer_sm80" / "gate.py"
    for path in (bench.vllm.cache_utils, gate):
        path.write_bytes(path.read_bytes() + MINE)
    before = snapshot(bench.site)
    with pytest.raises(RefusedError) as caught:
        bench.rollback()
    assert caught.value.code == "file-drift"
    assert caught.value.exit_code == 4
    assert sorted(caught.value.paths) == sorted([str(gate), str(bench.vllm.cache_utils)])
    assert snapshot(bench.site) == before


def test_force_keeps_copies_and_restores(bench: Bench) -> None:
    before = snapshot(bench.site)
    bench.install()
    gate = bench.vllm.root / "deepinfer_sm80" / "gate.py"
    edited = {}
    for path in (bench.vllm.cache_utils, gate):
        path.write_bytes(path.read_bytes() + MINE)
        edited[path.relative_to(bench.site).as_posix()] = path.read_bytes()
    report = bench.rollback(force=True)
    assert sorted(Path(path).read_bytes() for path in report.copies) == sorted(edited.values())
    assert {path.partition("/")[2]: content for path, content in bench.kept().items()} == edited
    after = {path: value for path, value in snapshot(bench.site).items() if ".deepinfer-kept" not in path}
    assert after == before


def test_file_the_user_restored_is_left_alone(bench: Bench) -> None:
    before = snapshot(bench.site)
    original = bench.vllm.cache_utils.read_bytes()
    bench.install()
    bench.vllm.cache_utils.write_bytes(original)
    assert bench.rollback().restored == ()
    assert snapshot(bench.site) == before


def test_missing_file_is_restored(bench: Bench) -> None:
    before = snapshot(bench.site)
    bench.vllm.cache_utils.chmod(0o600)
    bench.install()
    bench.vllm.cache_utils.unlink()
    (bench.vllm.root / "deepinfer_sm80" / "gate.py").unlink()
    bench.rollback()
    assert bench.vllm.cache_utils.stat().st_mode & 0o777 == 0o600
    bench.vllm.cache_utils.chmod(0o644)
    assert snapshot(bench.site) == before


def test_file_without_final_newline_round_trips(bench: Bench) -> None:
    bench.vllm.cache_utils.write_bytes(bench.vllm.cache_utils.read_bytes().rstrip(b"\n"))
    before = snapshot(bench.site)
    bench.install(force=True)
    shutil.rmtree(bench.state_dir / "backups")
    bench.rollback()
    after = {path: value for path, value in snapshot(bench.site).items() if ".deepinfer-kept" not in path}
    assert after == before


def test_without_backups_the_block_is_taken_out(bench: Bench) -> None:
    before = snapshot(bench.site)
    bench.install()
    shutil.rmtree(bench.state_dir / "backups")
    bench.rollback()
    assert snapshot(bench.site) == before


@pytest.mark.parametrize("spoil", ["missing", "damaged"])
def test_edited_file_without_its_backup_is_refused(bench: Bench, spoil: str) -> None:
    record = bench.install()
    backup = bench.state_dir / (next(entry.backup for entry in record.files if entry.backup) or "")
    bench.vllm.cache_utils.write_bytes(MINE)
    backup.unlink() if spoil == "missing" else backup.write_bytes(b"rotten")
    before = snapshot(bench.vllm.root)
    with pytest.raises(RefusedError) as caught:
        bench.rollback(force=True)
    assert caught.value.code == "backup-missing"
    assert "pip install --force-reinstall --no-deps vllm==0.33.0" in (caught.value.hint or "")
    assert snapshot(bench.vllm.root) == before


def test_newer_deepinfer_with_the_same_schema(bench: Bench) -> None:
    before = snapshot(bench.site)
    bench.install()
    _edit_record(bench, deepinfer_version="99.0", something_new=[1, 2])
    bench.rollback()
    assert snapshot(bench.site) == before


def test_newer_schema_is_refused_readably(bench: Bench) -> None:
    bench.install()
    _edit_record(bench, schema_version=2)
    before = snapshot(bench.site)
    with pytest.raises(FailedError) as caught:
        bench.rollback()
    assert caught.value.code == "record-too-new"
    assert snapshot(bench.site) == before


def test_reinstall_of_the_same_version(bench: Bench) -> None:
    before = snapshot(bench.site)
    bench.install()
    bench.vllm.reinstall()
    report = bench.rollback()
    assert report.restored == ()
    assert snapshot(bench.site) == before


def test_old_backups_never_go_over_a_new_vllm(bench: Bench) -> None:
    bench.install()
    bench.vllm.reinstall("0.34.0")
    newer = bench.vllm.cache_utils.read_bytes() + b"NEW = 1\n"
    bench.vllm.cache_utils.write_bytes(newer)
    report = bench.rollback()
    assert report.stale
    assert bench.vllm.cache_utils.read_bytes() == newer
    assert not (bench.vllm.root / "deepinfer_sm80").exists()
    assert not bench.state_dir.exists()


def test_missing_file_of_a_new_vllm_is_not_brought_back(bench: Bench) -> None:
    bench.install()
    bench.vllm.reinstall("0.34.0")
    bench.vllm.cache_utils.unlink()
    bench.rollback()
    assert not bench.vllm.cache_utils.exists()


def test_block_in_a_new_vllm_is_taken_out(bench: Bench) -> None:
    """Upgraded, then `git apply` or `cp -r` hooked the new file again."""
    bench.install()
    bench.vllm.reinstall("0.34.0")
    newer = bench.vllm.cache_utils.read_bytes() + b"NEW = 1\n"
    bench.vllm.cache_utils.write_bytes(newer)
    _write_record_row(bench.vllm, newer)
    bench.vllm.cache_utils.write_bytes(hook.append(newer))
    report = bench.rollback()
    assert report.stale
    assert bench.vllm.cache_utils.read_bytes() == newer


def test_edited_block_carrier_in_a_new_vllm_keeps_the_edit(bench: Bench) -> None:
    bench.install()
    bench.vllm.reinstall("0.34.0")
    edited = hook.append(bench.vllm.cache_utils.read_bytes() + MINE)
    bench.vllm.cache_utils.write_bytes(edited)
    with pytest.raises(RefusedError):
        bench.rollback()
    bench.rollback(force=True)
    assert bench.vllm.cache_utils.read_bytes() == hook.strip(edited)
    assert list(bench.kept().values()) == [edited]


def _write_record_row(vllm: FakeVllm, content: bytes) -> None:
    name = vllm.cache_utils.relative_to(vllm.site).as_posix()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    (path,) = vllm.site.glob("vllm-*.dist-info/RECORD")
    rows = [row for row in path.read_text().splitlines() if not row.startswith(f"{name},")]
    path.write_text("\n".join([*rows, f"{name},sha256={digest},{len(content)}"]) + "\n")


def test_unrecorded_overlay_is_rolled_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(bench.site)
    bench.install()
    _forget(bench, monkeypatch)
    report = bench.rollback()
    assert report.unrecorded
    assert snapshot(bench.site) == before


def test_unrecorded_overlay_in_a_checkout(
    bench: Bench, fake_vllm: Callable[..., FakeVllm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.vllm = fake_vllm(tmp_path / "checkout", checkout=True)
    before = bench.vllm.snapshot()
    bench.install()
    _forget(bench, monkeypatch)
    bench.rollback()
    assert bench.vllm.snapshot() == before
    assert git(bench.site, "status", "--porcelain").stdout == ""


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("what", ["hook", "payload", "extra"])
def test_unrecorded_and_edited_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str, force: bool
) -> None:
    bench.install()
    _forget(bench, monkeypatch)
    folder = bench.vllm.root / "deepinfer_sm80"
    path = {"hook": bench.vllm.cache_utils, "payload": folder / "gate.py", "extra": folder / "own.py"}[what]
    path.write_bytes(MINE + (path.read_bytes() if path.exists() else b""))
    before = snapshot(bench.site)
    with pytest.raises(RefusedError) as caught:
        bench.rollback(force=force)
    assert caught.value.code == "not-verifiable"
    assert caught.value.paths == (str(path),)
    assert "--force-reinstall --no-deps vllm==0.33.0" in (caught.value.hint or "")
    assert "apply -R" in (caught.value.hint or "")
    assert snapshot(bench.site) == before


@pytest.mark.parametrize("leads_to", ["folder", "nothing"])
def test_unrecorded_with_a_link_in_our_folder_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leads_to: str
) -> None:
    bench.install()
    shutil.rmtree(bench.state_dir)
    monkeypatch.setattr(rollback_plan.payloads, "bundled", lambda: bench.payload)
    link = bench.vllm.root / "deepinfer_sm80" / "mine"
    link.symlink_to(tmp_path if leads_to == "folder" else tmp_path / "no")
    with pytest.raises(RefusedError) as caught:
        bench.rollback()
    assert (caught.value.code, caught.value.paths) == ("not-verifiable", (str(link),))


def test_no_pip_is_named_where_it_would_install_elsewhere(
    fake_vllm: Callable[..., FakeVllm], tmp_path: Path
) -> None:
    tree = fake_vllm(tmp_path / "tree")
    hint = rollback_plan.reinstall_hint(rollback_plan.Site.of(tree.target()))
    assert hint == "put back the files of the vLLM 0.33.0 wheel"


def test_leftover_after_an_uninstall(bench: Bench) -> None:
    bench.install()
    site = bench.site
    for path in sorted((site / "vllm").rglob("*"), reverse=True):
        if "deepinfer_sm80" not in path.parts and path.is_file():
            path.unlink()
    shutil.rmtree(next(site.glob("*.dist-info")))
    other = site / "other.py"
    other.write_text("")
    parent = find_leftover(target=site)
    assert parent == site
    report = bench.rollback(where=parent)
    assert not report.nothing
    assert list(site.iterdir()) == [other]
    assert bench.rollback(where=parent).nothing


def test_leftover_keeps_a_users_file(bench: Bench) -> None:
    bench.install()
    site, mine = bench.site, bench.vllm.root / "mine.txt"
    for path in sorted((site / "vllm").rglob("*"), reverse=True):
        if "deepinfer_sm80" not in path.parts and path.is_file():
            path.unlink()
    mine.write_bytes(MINE)
    bench.rollback(where=site)
    assert list((site / "vllm").iterdir()) == [mine]


def test_empty_folder_of_ours_without_anything_else(bench: Bench) -> None:
    before = snapshot(bench.site)
    (bench.vllm.root / "deepinfer_sm80" / "__pycache__").mkdir(parents=True)
    assert not bench.rollback().nothing
    assert snapshot(bench.site) == before


def test_changed_owner_of_a_tree_is_kept(bench: Bench) -> None:
    """A tree that was handed to another user belongs to that user afterwards too."""
    if os.geteuid() != 0:
        pytest.skip("only root can hand files over")
    bench.install()
    for path in [bench.site, *bench.site.rglob("*")]:
        os.chown(path, 1234, 1234)
    bench.rollback()
    assert {path.stat().st_uid for path in bench.site.rglob("*")} == {1234}


def _build_wheel(folder: Path, version: str) -> Path:
    """A small real wheel named vllm."""
    path = folder / f"vllm-{version}-py3-none-any.whl"
    info = f"vllm-{version}.dist-info"
    files = {f"vllm/{name}": text for name, text in sources(version).items()}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = []
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(text.encode())}")
        wheel.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return path


def test_real_pip_between_install_and_rollback(
    tmp_path: Path, fake_manifest: Manifest, fake_payload: Callable[..., Payload]
) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python3*/site-packages")

    def pip(*arguments: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "--quiet"]
        subprocess.run([*command, *arguments], check=True, capture_output=True)

    offline = ("install", "--no-index", "--no-deps", "--disable-pip-version-check")
    wheels = [_build_wheel(tmp_path, version) for version in ("0.33.0", "0.34.0")]
    pip(*offline, wheels[0])
    before = snapshot(site)
    bench = Bench(FakeVllm(site, "0.33.0", "deepseek_v41"), fake_manifest, fake_payload())

    bench.install()
    pip(*offline, "--force-reinstall", wheels[0])
    assert bench.inspect().state == "stale"
    bench.rollback()
    assert snapshot(site) == before

    bench.install()
    pip(*offline, "--upgrade", wheels[1])
    assert bench.inspect().state == "stale"
    newer = snapshot(site, ignore=("__pycache__", "deepinfer_sm80", ".deepinfer"))
    assert bench.rollback().stale
    assert snapshot(site) == newer

    pip(*offline, "--force-reinstall", wheels[0])
    bench.install()
    pip("uninstall", "--yes", "vllm")
    assert (site / "vllm" / "deepinfer_sm80").is_dir()
    parent = find_leftover(target=site)
    assert parent is not None
    recover(parent, parent / ".deepinfer")
    apply_rollback(plan_rollback(parent))
    assert not (site / "vllm").exists()
    assert find_leftover(target=site) is None


def _real(bench: Bench, parent: Path, version: str) -> None:
    """Let the bench work on a real release with the real payload."""
    bench.vllm = FakeVllm(parent, version, "deepseek_v41")
    bench.manifest, bench.payload = manifest.load(), payload.bundled()


@pytest.mark.release
@pytest.mark.parametrize("version", RELEASES)
def test_real_release_round_trip(version: str, real_release: Callable[..., Path], bench: Bench) -> None:
    parent = real_release(version, slim=False)
    before = snapshot(parent)
    _real(bench, parent, version)
    record = bench.install()
    assert record.match == "supported" and record.release == version
    assert bench.inspect().state == "installed"
    assert bench.install() == record
    bench.rollback()
    assert snapshot(parent) == before


@pytest.mark.release
@pytest.mark.parametrize("end", ["rollback", "adopt"])
@pytest.mark.parametrize("way", ["git apply", "cp -r"])
@pytest.mark.parametrize("version", ["0.30.0", "0.33.0"])
def test_overlay_brought_by_hand(
    version: str, way: str, end: str, real_release: Callable[..., Path], bench: Bench, tmp_path: Path
) -> None:
    parent = real_release(version)
    before = snapshot(parent)
    _real(bench, parent, version)
    plan = bench.plan()
    if way == "git apply":
        patch = tmp_path / "overlay.patch"
        patch.write_bytes(patchfile.unified_patch(plan))
        git(parent, "apply", str(patch))
    else:
        patchfile.write_tree(plan, tmp_path / "tree")
        # the fixture's files are hard links to a cache: cp must not write through them
        subprocess.run(["cp", "-r", "--remove-destination", f"{tmp_path}/tree/.", parent], check=True)
    assert bench.inspect().state == "unrecorded"
    assert {change.action.value for change in bench.plan().changes} == {"keep"}
    if end == "adopt":
        assert bench.install().adopted
        assert bench.inspect().state == "installed"
        assert not bench.rollback().unrecorded
    else:
        assert bench.rollback().unrecorded
    assert snapshot(parent) == before
    assert bench.inspect().state == "not-installed"
