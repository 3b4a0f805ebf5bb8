"""Driver, torch's CUDA and the toolkit, without importing torch or TileLang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_cli.detect import cuda, host

NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {release}, V{release}.48" ;;
*) echo '#$ _HERE_={home}/bin' >&2 ;;
esac
"""


def toolkit(home: Path, release: str, headers: str | None) -> Path:
    """A small CUDA toolkit."""
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(release=release, home=home))
    nvcc.chmod(0o755)
    if headers:
        major, minor = headers.split(".")
        (home / "include").mkdir()
        (home / "include" / "cuda.h").write_text(
            f"#define CUDA_VERSION {int(major) * 1000 + int(minor) * 10}\n"
        )
    return home


@pytest.mark.parametrize(
    ("text", "version", "want"),
    [
        ("__version__ = '2.14.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n", None, "13.0"),
        ("cuda = '12.8'\n", "2.14.0+cu130", "12.8"),
        ("cuda: Optional[str] = None\n", "2.14.0+cpu", None),
        (None, "2.14.0+cu126", "12.6"),
        (None, "2.14.0", None),
        (None, None, None),
    ],
)
def test_torchs_cuda(text: str | None, version: str | None, want: str | None) -> None:
    assert cuda.torch_cuda(text, version) == want


@pytest.mark.parametrize(
    ("driver", "runs", "runtime", "want"),
    [
        ("580.65.06", "13.0", "13.0", None),
        ("580.65.06", "13.1", "12.8", None),
        ("550.54", "12.4", "13.0", "problem"),
        ("550.54", "12.4", "12.8", "note"),
        ("550.54", None, "13.0", "problem"),
        ("580.65", None, "13.0", None),
        (None, None, "13.0", None),
    ],
)
def test_the_driver_against_torchs_cuda(driver, runs, runtime, want) -> None:
    found = cuda.driver_problem(driver, runs, runtime)
    assert (found and found[0]) == want
    assert "580" in cuda.driver_hint(13)


def test_a_whole_toolkit(tmp_path: Path) -> None:
    found = cuda.toolkit(toolkit(tmp_path / "cuda", "13.0", "13.0"))
    assert (found.release, found.headers, found.problem) == ("13.0", "13.0", None)


def test_headers_are_looked_for_beside_the_compiler_that_a_wrapper_calls(tmp_path: Path) -> None:
    real = toolkit(tmp_path / "cuda", "13.0", "13.0")
    wrapper = tmp_path / "local" / "bin" / "nvcc"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nexec {real}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    assert cuda.toolkit(tmp_path / "local").problem is None


@pytest.mark.parametrize(
    ("release", "headers", "word"),
    [("13.0", None, "no headers"), ("13.0", "12.8", "the headers beside it are of 12.8")],
)
def test_skewed_and_missing_headers(tmp_path: Path, release: str, headers: str | None, word: str) -> None:
    assert word in (cuda.toolkit(toolkit(tmp_path / "cuda", release, headers)).problem or "")


def test_no_toolkit_and_one_that_does_not_run(tmp_path: Path) -> None:
    assert "not found" in (cuda.toolkit(None).problem or "")
    assert "no bin/nvcc" in (cuda.toolkit(tmp_path).problem or "")
    broken = toolkit(tmp_path / "cuda", "13.0", "13.0")
    (broken / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert "does not run" in (cuda.toolkit(broken).problem or "")


def test_the_lookup_is_tilelangs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place that exists is taken, whatever is in it; asked in both ways with the same environments."""
    pytest.importorskip("tilelang")
    home = toolkit(tmp_path / "somewhere", "13.0", "13.0")
    script = "from tilelang.env import _find_cuda_home; print('=' + _find_cuda_home())"
    for environ in (
        {"CUDA_HOME": str(home)},
        {"CUDA_PATH": str(home)},
        {"CUDA_HOME": str(tmp_path / "nothing")},
        {"PATH": f"{home}/bin:{os.environ['PATH']}"},
    ):
        with monkeypatch.context() as patch:
            patch.delenv("CUDA_HOME", raising=False)
            patch.delenv("CUDA_PATH", raising=False)
            for name, value in environ.items():
                patch.setenv(name, value)
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
            theirs = done.stdout.rpartition("=")[2].strip() or None
            assert cuda.interpreter(Path(sys.executable))["cuda_home"] == theirs


def test_host_memory_is_the_containers_where_that_is_less(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       1048576 kB\nMemFree: 1 kB\n")
    assert host.memory_bytes(info, tmp_path) == 2**30
    (tmp_path / "memory.max").write_text("max\n")
    assert host.memory_bytes(info, tmp_path) == 2**30
    (tmp_path / "memory.max").write_text(f"{2**29}\n")
    assert host.memory_bytes(info, tmp_path) == 2**29
    assert host.memory_bytes(tmp_path / "nothing", tmp_path) is None


def test_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert host.existing(tmp_path / "a" / "b") == tmp_path
    assert host.free_bytes(tmp_path / "a" / "b") > 0
    assert host.writable(tmp_path / "a")
