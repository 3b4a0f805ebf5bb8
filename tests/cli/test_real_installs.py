"""What people do to a real vLLM, through the command line: preview, upgrade, patch by hand, another version, a fork."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import deepinfer_sm80
import pytest

from deepinfer_cli.overlay import payload as payloads
from tests.cli.conftest import Cli, Run
from tests.conftest import RELEASES, git, snapshot
from tests.fakes import OPS, hooked_paths, rewrite

pytestmark = pytest.mark.release
PATCHES = Path(__file__).parents[2] / "patches"
CACHE_UTILS = "vllm/models/deepseek_v41/common/ops/cache_utils.py"
CONSTANT = "_SPARSE_PREFILL_TOPK_ALIGNMENT = "
STATE = (".deepinfer", "__pycache__")

Release = Callable[..., Path]


def install(cli: Cli, site: Path, *more: str) -> Run:
    """Installs for sm80 without asking."""
    return cli("install", "--target", site, "--arch", "sm80", "--yes", *more)


def state(cli: Cli, site: Path) -> str:
    """What `status` calls it."""
    return str(cli("status", "--target", site, "--json").document["data"]["state"])


def done(run: Run) -> Run:
    """Expects success."""
    assert run.code == 0, run.err
    return run


@pytest.mark.parametrize("version", RELEASES)
def test_a_dry_run_and_an_upgrade(
    cli: Cli, real_release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    site = real_release(version)
    start = snapshot(site)
    shown = done(cli("install", "--target", site, "--arch", "sm80", "--dry-run"))
    assert "dry run: nothing was written" in shown.out
    assert snapshot(site) == start

    older = tmp_path / "older" / "deepinfer_sm80"
    now = deepinfer_sm80.__version__
    shutil.copytree(payloads.bundled().root, older, ignore=shutil.ignore_patterns("__pycache__"))
    rewrite(older / "__init__.py", f'"{now}"', '"0.0.1"')
    with (older / "ops" / "gather" / "triton.py").open("a", encoding="utf-8") as file:
        file.write("# older\n")
    (older / "ops" / "gone.py").write_text("", encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(payloads, "bundled", lambda: payloads.load(older))
        done(install(cli, site))
    assert (site / "vllm" / "deepinfer_sm80" / "ops" / "gone.py").exists()
    assert f"upgrades overlay 0.0.1 to {now}" in done(install(cli, site)).out
    assert state(cli, site) == "installed"
    done(cli("verify", "--target", site, "--level", "static"))
    upgraded = snapshot(site, ignore=STATE)
    done(cli("rollback", "--target", site, "--yes"))
    assert snapshot(site) == start
    done(install(cli, site))
    assert snapshot(site, ignore=STATE) == upgraded


@pytest.mark.parametrize("version", RELEASES)
def test_patched_copied_and_installed_trees_are_equal_and_all_go_back(
    cli: Cli, real_release: Release, tmp_path: Path, version: str
) -> None:
    sites = {name: real_release(version, tmp_path / name) for name in ("patched", "copied", "installed")}
    start = snapshot(sites["patched"])
    git(sites["patched"], "apply", str(PATCHES / version / "vllm-sm80-deepinfer.patch"))
    done(cli("export", "tree", "--target", sites["copied"], "--into", tmp_path / "export"))
    # the files here are hard links to a cache: cp must not write through them
    subprocess.run(["cp", "-r", "--remove-destination", f"{tmp_path}/export/.", sites["copied"]], check=True)
    done(install(cli, sites["installed"]))
    trees = [snapshot(site, ignore=STATE) for site in sites.values()]
    assert trees[0] == trees[1] == trees[2] != start

    for name in ("patched", "copied"):
        assert state(cli, sites[name]) == "unrecorded"
        done(cli("verify", "--target", sites[name], "--level", "static"))
    done(cli("rollback", "--target", sites["patched"], "--yes"))
    assert "adopted overlay" in done(install(cli, sites["copied"])).out
    assert state(cli, sites["copied"]) == "installed"
    for name in ("copied", "installed"):
        done(cli("rollback", "--target", sites[name], "--yes"))
    assert all(snapshot(site) == start for site in sites.values())


@pytest.mark.parametrize("version", RELEASES)
def test_another_version_number_with_the_same_symbols_is_accepted_and_said(
    cli: Cli, real_release: Release, version: str
) -> None:
    site = real_release(version)
    rewrite(
        site / f"vllm-{version}.dist-info" / "METADATA", f"\nVersion: {version}\n", "\nVersion: 0.99.1.dev2\n"
    )
    start = snapshot(site)
    run = done(install(cli, site))
    sentence = f"compatible: every symbol that matters is as in vLLM {version}; 0.99.1.dev2 was not tested"
    assert sentence in run.out
    assert sentence in cli("status", "--target", site).out
    done(cli("rollback", "--target", site, "--yes"))
    assert snapshot(site) == start


@pytest.mark.parametrize("version", RELEASES)
def test_one_changed_symbol_is_refused_by_name_and_partial_installs_the_rest(
    cli: Cli, real_release: Release, version: str
) -> None:
    site = real_release(version)
    rewrite(site / CACHE_UTILS, f"{CONSTANT}128", f"{CONSTANT}64")
    start = snapshot(site)
    refused = install(cli, site)
    assert refused.code == 3
    assert f"{CONSTANT.split()[0]} (changed)" in refused.err
    assert "--partial installs the ops that fit: gather" in refused.err
    assert snapshot(site) == start
    done(install(cli, site, "--partial", "--force"))
    assert '_deepinfer_bind(__name__, skip=("combine",))' in (site / CACHE_UTILS).read_text(encoding="utf-8")
    assert "left to stock\tcombine" in done(cli("status", "--target", site)).out
    done(cli("verify", "--target", site, "--level", "static"))
    done(cli("rollback", "--target", site, "--yes"))
    assert f"{CONSTANT}64" in (site / CACHE_UTILS).read_text(encoding="utf-8")
    kept = {name for name in snapshot(site) if name.startswith(".deepinfer-kept")}
    assert {name: what for name, what in snapshot(site).items() if name not in kept} == start


@pytest.mark.parametrize("version", ["0.30.0", "0.33.0"])
def test_the_fork_layout(cli: Cli, real_release: Release, version: str) -> None:
    site = real_release(version)
    models = site / "vllm" / "models"
    (models / "deepseek_v41").rename(models / "deepseek_v4_1")
    for path in (models / "deepseek_v4_1").rglob("*.py"):
        if "deepseek_v41" in path.read_text(encoding="utf-8"):
            rewrite(path, "deepseek_v41", "deepseek_v4_1")
    start = snapshot(site)
    run = done(install(cli, site))
    assert f"supported (vLLM {version})" in run.out
    status = cli("status", "--target", site, "--json").document["data"]
    assert (status["state"], status["ops"]) == ("installed", list(OPS))
    files = [path for path in (site / "vllm").rglob("*.py") if "deepinfer_sm80" not in path.parts]
    hooked = {path.relative_to(site).as_posix() for path in files if b"_deepinfer_bind" in path.read_bytes()}
    assert hooked == set(hooked_paths(version, "deepseek_v4_1"))
    done(cli("verify", "--target", site, "--level", "static"))
    done(cli("rollback", "--target", site, "--yes"))
    assert snapshot(site) == start


def test_a_venv_inside_a_project_of_the_users_leaves_its_repository_alone(
    cli: Cli, real_release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "my project"
    site = real_release("0.33.0", project / "venv" / "lib" / "python3.12" / "site-packages")
    git(project, "init", "-q")
    git(project, "add", "-A", "-f")
    git(project, "commit", "-q", "-m", "Start")
    repository = snapshot(project / ".git")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path / "no git here"))
        done(install(cli, site))
        status = cli("status", "--target", site, "--json").document["data"]
        assert (status["state"], status["target"]["kind"]) == ("installed", "environment")
        assert (site / ".deepinfer" / "record.json").is_file()
        assert snapshot(project / ".git") == repository
        done(cli("rollback", "--target", site, "--yes"))
    assert git(project, "status", "--porcelain", "--ignored").stdout == ""


def test_a_git_checkout(cli: Cli, real_release: Release) -> None:
    site = real_release("0.33.0")
    shutil.rmtree(site / "vllm-0.33.0.dist-info")
    git(site, "init", "-q")
    git(site, "add", "-A")
    git(site, "commit", "-q", "-m", "Start")
    start = snapshot(site, ignore=(".git",))
    done(install(cli, site))
    changes = git(site, "status", "--porcelain").stdout.splitlines()
    edited = [f" M {path}" for path in hooked_paths("0.33.0")]
    assert sorted(changes) == [*edited, "?? vllm/deepinfer_sm80/"]
    status = cli("status", "--target", site, "--json").document["data"]
    assert (status["state"], status["target"]["kind"]) == ("installed", "checkout")
    assert (site / ".git" / "deepinfer" / "record.json").is_file()
    done(cli("verify", "--target", site / "vllm", "--level", "static"))
    done(cli("rollback", "--target", site, "--yes"))
    assert git(site, "status", "--porcelain", "--ignored").stdout == ""
    assert snapshot(site, ignore=(".git",)) == start
    assert not (site / ".git" / "deepinfer").exists()


def test_the_environment_of_an_interpreter(
    cli: Cli, real_release: Release, tmp_path: Path, gpus: Callable[..., None]
) -> None:
    gpus((8, 0), (9, 0))
    folder = tmp_path / "venv dir"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python3*/site-packages")
    real_release("0.33.0", site)
    start = snapshot(site)
    run = done(cli("install", "--python", python, "--yes"))
    assert f"what --python ({python}) imports" in run.err
    assert "for sm80 (" in run.out
    # a child of that interpreter tried: it has no torch, and that is said
    assert "this vLLM cannot be imported here (" in run.out
    status = cli("status", "--python", python, "--json").document["data"]
    assert (status["state"], status["target"]["kind"]) == ("installed", "environment")
    done(cli("verify", "--python", python, "--level", "static"))
    done(cli("rollback", "--python", python, "--yes"))
    assert snapshot(site) == start
