"""The command line on the four real releases, from install to rollback."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import deepinfer_sm80
import pytest

from deepinfer_cli.render import joined
from tests.cli.conftest import Cli
from tests.conftest import RELEASES, snapshot
from tests.fakes import OPS

ROOT = Path(__file__).parents[2]


@pytest.mark.release
@pytest.mark.parametrize("version", RELEASES)
def test_install_status_rollback_gives_back_every_byte(
    cli: Cli, real_release: Callable[..., Path], version: str
) -> None:
    site = real_release(version)
    start = snapshot(site)
    run = cli("install", "--target", site, "--arch", "sm80", "--yes")
    assert run.code == 0, run.err
    assert f"supported (vLLM {version})" in run.out
    status = cli("status", "--target", site, "--json").document
    assert status["data"]["state"] == "installed"
    assert status["data"]["ops"] == list(OPS)
    for path in site.rglob("*.py"):
        compile(path.read_bytes(), path, "exec", dont_inherit=True)
    again = cli("install", "--target", site, "--arch", "sm80", "--yes")
    assert again.out == f"already installed: overlay {deepinfer_sm80.__version__}, {joined(OPS)}\n"
    verify = cli("verify", "--target", site, "--level", "static")
    assert verify.code == 0, verify.out + verify.err
    back = cli("rollback", "--target", site, "--yes")
    assert back.code == 0, back.err
    assert snapshot(site) == start
    assert cli("rollback", "--target", site).out == "nothing to roll back\n"


@pytest.mark.release
def test_status_knows_a_published_release_by_its_hashes(cli: Cli, real_release: Callable[..., Path]) -> None:
    from deepinfer_cli.commands.status_match import is_published
    from deepinfer_cli.detect.vllm import find_target
    from deepinfer_cli.overlay import manifest

    for version in RELEASES:
        target = find_target(target=real_release(version))
        assert is_published(target, manifest.load())


def test_the_built_wheel_installs_and_changes_no_torch_or_vllm(
    tmp_path: Path, user_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", user_environment.get("HOME", str(tmp_path)))  # pip's settings
    monkeypatch.delenv("PYTHONPATH", raising=False)
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT], check=True)
    wheel = next(wheels.glob("deepinfer-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
        assert folders == {
            "deepinfer_cli",
            "deepinfer_sm80",
            f"deepinfer-{deepinfer_sm80.__version__}.dist-info",
        }
    folder = tmp_path / "env"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel], check=True
    )
    names = subprocess.run(
        [python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout.lower()
    assert not any(
        line.startswith(("torch", "vllm", "triton", "tilelang", "nvidia-c")) for line in names.splitlines()
    )
    run = subprocess.run(
        [folder / "bin" / "deepinfer", "--version"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert run.stdout == f"{deepinfer_sm80.__version__}\n"
    status = subprocess.run(
        [folder / "bin" / "deepinfer", "status"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (status.returncode, status.stderr.split(":")[0]) == (3, "error[vllm-not-found]")
    files = subprocess.run(
        [
            python,
            "-c",
            "import deepinfer_sm80, pathlib; print(*sorted(p.name for p in pathlib.Path(deepinfer_sm80.__file__).parent.iterdir()))",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.split()
    assert {"manifest.toml", "gate.py", "bindings", "ops", "numerics"} <= set(files)
