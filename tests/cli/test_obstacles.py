"""What cannot work is said before it is tried, and no hint leads back to it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, install_into
from tests.conftest import FakeVllm
from tests.overlay.test_state import mounted


@pytest.mark.usefixtures("fake")
def test_a_dry_run_tells_of_a_read_only_disk(
    cli: Cli, fake_vllm: Callable[[Path], FakeVllm], tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk") as disk:
        vllm = fake_vllm(disk / "site")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        run = cli("install", "--target", vllm.site, "--arch", "sm80", "--dry-run")
        assert run.code == 3 and "error[read-only]" in run.err, run.err
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        install_into(cli, vllm)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        run = cli("rollback", "--target", vllm.site, "--dry-run")
        assert run.code == 3 and "error[read-only]" in run.err, run.err
        assert "DEEPINFER_DISABLE=1" in run.err
        assert cli("install", "--target", vllm.site, "--arch", "sm80", "--dry-run").code == 0


def test_a_damaged_journal_is_no_reason_to_name_a_command_that_refuses(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    (fake.site / ".deepinfer" / "journal.json").write_text("x")
    run = cli("status", "--target", fake.site)
    assert run.code == 1
    assert "next:" not in run.err
    assert "cannot be read" in run.out
    assert cli("rollback", "--target", fake.site, "--yes").code == 1


@pytest.mark.parametrize("form", ["patch", "docker"])
def test_an_export_of_edited_files_does_not_advise_what_it_does_not_do(
    cli: Cli, fake: FakeVllm, tmp_path: Path, form: str
) -> None:
    fake.cache_utils.write_bytes(b"# mine\n" + fake.cache_utils.read_bytes())
    place = [] if form == "patch" else ["--into", tmp_path / "out"]
    run = cli("export", form, "--target", fake.site, *place)
    assert run.code == 4
    assert "--force" not in run.err


@pytest.mark.parametrize("name", ["m$x", "m,n", 'm"n', "m\nn"])
@pytest.mark.parametrize("where", ["--into", "--container-root"])
def test_docker_paths_that_no_docker_reads_alike_are_refused(
    cli: Cli, fake: FakeVllm, tmp_path: Path, name: str, where: str
) -> None:
    odd = tmp_path / name
    others = [] if where == "--into" else ["--into", tmp_path / "out"]
    run = cli("export", "docker", "--target", fake.site, where, odd, *others)
    assert run.code == 2
    assert not odd.exists()


def test_the_compose_command_can_be_pasted(cli: Cli, fake: FakeVllm, tmp_path: Path) -> None:
    run = cli("export", "docker", "--target", fake.site, "--into", tmp_path / "m n")
    assert f"-f '{tmp_path}/m n/compose.deepinfer.yaml' up" in run.out


def test_status_of_a_vllm_that_lacks_a_file_says_what_an_install_says(cli: Cli, fake: FakeVllm) -> None:
    fake.cache_utils.unlink()
    refused = cli("install", "--target", fake.site, "--arch", "sm80", "--partial", "--yes")
    assert refused.code == 4 and "error[file-missing]" in refused.err
    run = cli("status", "--target", fake.site)
    assert str(fake.cache_utils) in run.out and "reinstall vLLM" in run.out
    assert "next:" not in run.err and "--partial" not in run.err


@pytest.mark.release
@pytest.mark.parametrize("gone", ["models/deepseek_v41/attention.py", "v1/worker/workspace.py"])
def test_a_missing_file_is_named_whether_it_is_hooked_or_only_relied_on(
    cli: Cli, real_release: Callable[..., Path], gone: str
) -> None:
    site = real_release("0.33.0")
    (site / "vllm" / gone).unlink()
    refused = cli("install", "--target", site, "--arch", "sm80", "--partial", "--dry-run")
    assert refused.code == 4 and "error[file-missing]" in refused.err and gone in refused.err
    assert gone in cli("status", "--target", site).out


@pytest.mark.usefixtures("fake")
def test_a_wrong_path_is_said_before_a_missing_gpu(cli: Cli, tmp_path: Path) -> None:
    run = cli("install", "--target", tmp_path / "none")
    assert run.code == 3 and "error[vllm-not-found]" in run.err
    assert "gpu-not-found" not in run.err
