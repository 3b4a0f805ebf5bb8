"""What the commands find on this machine: compile caches and running processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_cli import paths
from deepinfer_cli.detect.process import running
from tests.cli.conftest import Cli, install_into
from tests.conftest import FakeVllm

TRITON_ENTRY = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567ABCDEFGHIJKLMNOPQRST"


def fill(folder: Path, *names: str) -> None:
    """Entries of 10 bytes each."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "data").write_bytes(b"0123456789")


def test_the_defaults_are_those_of_the_tools(tmp_path: Path) -> None:
    found = {cache.name: str(cache.folder) for cache in paths.caches({"HOME": str(tmp_path)})}
    assert found["Triton"] == f"{tmp_path}/.triton/cache"
    assert found["TileLang"] == f"{tmp_path}/.tilelang/cache"
    assert "/torchinductor_" in found["torch.compile"]
    assert found["vLLM compile"] == f"{tmp_path}/.cache/vllm/torch_compile_cache"


def test_the_variables_move_them(tmp_path: Path) -> None:
    env = {
        "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": "/a",
        "TILELANG_CACHE_DIR": "/b",
        "TORCHINDUCTOR_CACHE_DIR": "/c",
        "VLLM_CACHE_ROOT": "/d",
    }
    assert [str(cache.folder) for cache in paths.caches(env)] == ["/a", "/b", "/c", "/d/torch_compile_cache"]
    assert str(paths.caches({"HOME": "/h", "TRITON_HOME": "/t"})[0].folder) == "/t/.triton/cache"
    assert (
        str(paths.caches({"HOME": "/h", "XDG_CACHE_HOME": "/x"})[3].folder) == "/x/vllm/torch_compile_cache"
    )


def test_only_entries_of_the_tool_are_counted_and_cleared(tmp_path: Path) -> None:
    fill(tmp_path, TRITON_ENTRY, "my-project", "notes")
    (tmp_path / ("A" * 52)).symlink_to(tmp_path / "my-project")
    cache = paths.caches({"HOME": "/h", "TRITON_CACHE_DIR": str(tmp_path)})[0]
    assert (cache.size, cache.foreign) == (10, 3)
    assert paths.clear(cache) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A" * 52, "my-project", "notes"]
    assert (tmp_path / "my-project" / "data").exists()


def test_install_clears_caches_after_showing_them(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "triton"
    fill(folder, TRITON_ENTRY, "mine")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    install_into(cli, fake)
    refused = cli("install", "--target", fake.site, "--arch", "sm80", "--clear-caches")
    assert refused.code == 2
    assert "error[confirmation-required]" in refused.err
    assert (folder / TRITON_ENTRY).exists()
    run = install_into(cli, fake, "--clear-caches")
    assert f"Triton\t10 B\t{folder}\tTRITON_CACHE_DIR" in run.out
    assert "cleared 10 B of compile caches" in run.out
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert "no compile caches to clear" in install_into(cli, fake, "--clear-caches").out


def test_a_dry_run_clears_nothing(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "triton"
    fill(folder, TRITON_ENTRY)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    cli("install", "--target", fake.site, "--arch", "sm80", "--clear-caches", "--dry-run")
    assert (folder / TRITON_ENTRY).exists()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_process_that_has_a_library_of_this_vllm_mapped_is_found(tmp_path: Path) -> None:
    root = tmp_path / "site packages" / "vllm"
    root.mkdir(parents=True)
    library = root / "_C.abi3.so"
    library.write_bytes(b"\0" * 4096)
    code = (
        "import mmap, sys; file = open(sys.argv[1], 'rb'); "
        "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(library)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        found = running(root)
        child.communicate("")
    assert [process.pid for process in found] == [child.pid]
    assert "python" in found[0].command
    assert running(root) == ()


def test_without_proc_nothing_is_found(tmp_path: Path) -> None:
    assert running(tmp_path, proc=tmp_path / "proc") == ()
    assert os.getpid() not in {process.pid for process in running(Path(sys.prefix))}
