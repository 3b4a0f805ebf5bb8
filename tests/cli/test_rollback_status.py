"""`deepinfer rollback` and `deepinfer status` in every state a vLLM can be in."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.overlay import state as state_folder
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.payload import Payload
from tests.cli.conftest import Cli, install_into, use_payload
from tests.conftest import FakeVllm


def state(cli: Cli, vllm: FakeVllm) -> tuple[int, str]:
    """Exit code and state that `status` gives."""
    run = cli("status", "--target", vllm.site, "--json")
    return run.code, run.document["data"]["state"]


def test_rollback_gives_back_every_byte_and_says_what_it_did(cli: Cli, fake: FakeVllm) -> None:
    start = fake.snapshot()
    install_into(cli, fake)
    run = cli("rollback", "--target", fake.site, "--yes")
    assert run.code == 0
    assert run.out.splitlines()[0] == "Action\tPath\tWhat"
    assert run.out.splitlines()[-1] == "rolled back: 1 file restored, 5 files removed"
    assert fake.snapshot() == start


def test_rolling_back_twice_is_fine(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    cli("rollback", "--target", fake.site, "--yes")
    run = cli("rollback", "--target", fake.site)
    assert (run.code, run.out) == (0, "nothing to roll back\n")
    assert cli("rollback", "--target", fake.site, "--json").document["data"]["nothing"] is True


def test_rollback_needs_a_yes_and_no_manifest_no_gpu(
    cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = fake.snapshot()
    install_into(cli, fake)
    refused = cli("rollback", "--target", fake.site)
    assert refused.code == 2
    assert "error[confirmation-required]" in refused.err
    monkeypatch.setattr(
        "deepinfer_cli.overlay.manifest.load", lambda *_: pytest.fail("the manifest was read")
    )
    monkeypatch.setenv("PATH", "")
    assert cli("rollback", "--target", fake.site, "--yes").code == 0
    assert fake.snapshot() == start


def test_an_edited_file_is_refused_and_force_keeps_it(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    edited = fake.cache_utils.read_bytes() + b"# mine\n"
    fake.cache_utils.write_bytes(edited)
    assert state(cli, fake) == (1, "modified")
    shown = cli("status", "--target", fake.site)
    assert (
        "modified\tvllm/models/deepseek_v41/common/ops/cache_utils.py\tedited since it was installed"
        in shown.out
    )
    assert "error[overlay-modified]" in shown.err
    run = cli("rollback", "--target", fake.site, "--yes")
    assert run.code == 4
    assert "error[file-drift]" in run.err
    forced = cli("rollback", "--target", fake.site, "--yes", "--force")
    assert forced.code == 0
    kept = forced.err.split("your edited file was kept as ")[1].splitlines()[0]
    assert Path(kept).read_bytes() == edited


def test_after_a_reinstall_of_vllm_only_what_is_ours_goes(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    fake.reinstall("0.30.0")
    assert state(cli, fake) == (1, "stale")
    run = cli("rollback", "--target", fake.site, "--yes")
    assert run.code == 0
    assert "vLLM was reinstalled or upgraded since" in run.out
    assert not (fake.root / "deepinfer_sm80").exists()
    assert state(cli, fake) == (0, "not-installed")


def test_what_an_uninstall_left_is_named_and_rolled_back(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    for path in [*fake.root.iterdir(), *fake.site.glob("*.dist-info")]:
        if path.name != "deepinfer_sm80":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run = cli("status", "--target", fake.site)
    assert run.code == 3
    assert "error[vllm-not-found]" in run.err
    assert f"deepinfer rollback --target {fake.site}" in run.err
    done = cli("rollback", "--target", fake.site, "--yes")
    assert done.code == 0
    assert list(fake.site.iterdir()) == []


def test_an_unrecorded_overlay_is_rolled_back_when_it_can_be_verified(
    cli: Cli,
    fake: FakeVllm,
    fake_payload: Callable[..., Payload],
    fake_manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = fake.snapshot()
    install_into(cli, fake)
    shutil.rmtree(fake.site / ".deepinfer")
    assert state(cli, fake) == (0, "unrecorded")
    use_payload(fake_payload("0.9.0"), fake_manifest, monkeypatch)
    refused = cli("rollback", "--target", fake.site, "--yes")
    assert refused.code == 4
    assert "error[not-verifiable]" in refused.err
    use_payload(fake_payload("0.1.0"), fake_manifest, monkeypatch)
    run = cli("rollback", "--target", fake.site, "--yes")
    assert run.code == 0
    assert "there is no record" in run.out
    assert fake.snapshot() == start


def test_an_unreadable_record_says_what_to_do(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    record = fake.site / ".deepinfer" / "record.json"
    record.write_text("{")
    for verb in ("status", "rollback", "install"):
        more = ["--arch", "sm80", "--yes"] if verb == "install" else []
        run = cli(verb, "--target", fake.site, *more)
        assert run.code == 1
        assert "error[record-unreadable]" in run.err
        assert str(record) in run.err
    data = json.dumps({"schema_version": 99})
    record.write_text(data)
    assert "error[record-too-new]" in cli("status", "--target", fake.site).err


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_target_points_to_the_export(cli: Cli, fake: FakeVllm) -> None:
    fake.site.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        run = cli("install", "--target", fake.site, "--arch", "sm80", "--yes")
    finally:
        fake.site.chmod(0o755)
    assert run.code == 3
    assert "error[read-only]" in run.err
    assert "deepinfer export docker" in run.err


def test_a_read_only_target_has_another_way_on_for_a_rollback(
    cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_into(cli, fake)

    def read_only(*_: object) -> None:
        raise state_folder.write_error(OSError(errno.EROFS, "Read-only file system"), fake.site)

    monkeypatch.setattr(state_folder, "_take", read_only)
    run = cli("rollback", "--target", fake.site, "--yes")
    assert run.code == 3
    assert "error[read-only]" in run.err
    assert "DEEPINFER_DISABLE=1" in run.err
    assert "export" not in run.err


def test_verbose_adds_no_empty_table(cli: Cli, fake: FakeVllm) -> None:
    assert cli("status", "-v", "--target", fake.site).out == cli("status", "--target", fake.site).out
    install_into(cli, fake)
    assert "applied\tvllm/" in cli("status", "-v", "--target", fake.site).out


def test_status_before_an_install(cli: Cli, fake: FakeVllm) -> None:
    run = cli("status", "--target", fake.site)
    assert run.code == 0
    rows = dict(line.split("\t") for line in run.out.splitlines())
    assert rows["vLLM"] == "0.33.0, environment"
    assert rows["root"] == str(fake.root)
    assert rows["GPU"] == "no NVIDIA GPU in this machine"
    assert rows["overlay"] == "not-installed"
    assert rows["match"] == "supported (vLLM 0.33.0)"
    assert rows["journal"] == "none"
    assert run.err == f"next: deepinfer install --target {fake.site} --arch sm80\n"


def test_status_after_an_install_fits_one_screen(cli: Cli, fake: FakeVllm, gpus: Callable[..., None]) -> None:
    gpus((8, 0), (9, 0), visible="0")
    install_into(cli, fake)
    run = cli("status", "--target", fake.site)
    assert run.code == 0
    rows = dict(line.split("\t") for line in run.out.splitlines())
    assert rows["GPU 0"] == "NVIDIA Card, sm80, 80 GiB"
    assert rows["GPU 1"] == "NVIDIA Card, sm90, 80 GiB, not served"
    assert rows["driver"] == "580.65.06 (nvml)"
    assert rows["CUDA_VISIBLE_DEVICES"] == "0"
    assert rows["overlay"].startswith("0.1.0 installed, 20")
    assert rows["ops"] == "gather and combine"
    assert rows["files"] == "6 files applied"
    assert len(run.out.splitlines()) <= 24
    verbose = cli("status", "--target", fake.site, "-v").out
    assert "applied\tvllm/deepinfer_sm80/gate.py\t-" in verbose


def test_status_of_an_unknown_release(cli: Cli, fake: FakeVllm) -> None:
    fake.reinstall("0.33.1.dev3+g1234567")
    rows = dict(line.split("\t") for line in cli("status", "--target", fake.site).out.splitlines())
    assert rows["vLLM"] == "0.33.1.dev3+g1234567, environment"
    assert rows["match"] == (
        "compatible: every symbol that matters is as in vLLM 0.33.0; 0.33.1.dev3+g1234567 was not tested"
    )
    fake.cache_utils.write_text("def gather_cache():\n    return 1\n")
    FakeVllm(fake.site, "0.33.1.dev3+g1234567", fake.layout).reinstall_record()
    rows = dict(line.split("\t") for line in cli("status", "--target", fake.site).out.splitlines())
    assert rows["match"].startswith("unsupported: ")
    assert "cache_utils.py::gather_cache" in rows["match"]


def test_status_by_hashes_and_by_fingerprints_agree(cli: Cli, fake: FakeVllm) -> None:
    match = cli("status", "--target", fake.site, "--json").document["data"]["match"]
    shutil.rmtree(next(fake.site.glob("*.dist-info")))
    assert cli("status", "--target", fake.site, "--json").document["data"]["match"] == match
