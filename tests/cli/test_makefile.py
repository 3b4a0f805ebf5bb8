"""`make quickstart`, as a stranger runs it: from a bare copy of the repository, in a folder with a space in its name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import snapshot
from tests.fakes import hooked_paths

pytestmark = pytest.mark.release
ROOT = Path(__file__).parents[2]


def first_python() -> str:
    """The version that the Makefile picks."""
    done = subprocess.run([ROOT / "scripts" / "pythons.sh"], capture_output=True, text=True, check=True)
    return done.stdout.partition("\t")[0]


def tracked() -> list[str]:
    """What a clone would have."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a checkout: nothing says which files a clone has")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_quickstart_from_a_bare_clone(
    tmp_path: Path, pristine_release: Callable[[str], Path], user_environment: dict[str, str]
) -> None:
    if f"{sys.version_info[0]}.{sys.version_info[1]}" != first_python():
        pytest.skip("it runs in the Python that the Makefile picks, whichever runs the tests: once is enough")
    release = pristine_release("0.33.0")
    clone = tmp_path / "my clone"
    for name in tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=clone, env=user_environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shown = run("make", "quickstart")
    payload = len([name for name in tracked() if name.startswith("overlays/deepinfer_sm80/")])
    for sentence in (
        "supported (vLLM 0.33.0)",
        "installed overlay",
        f"files\t{payload + len(hooked_paths('0.33.0'))} files applied",
        "7 passed, 0 failed",
        "not run: compile: ",
        "not run: live: ",
    ):
        assert sentence in shown
    packages = run(".venv/bin/python", "-m", "pip", "list", "--format=freeze").lower()
    assert not any(line.startswith(("torch", "triton", "vllm")) for line in packages.splitlines())
    assert "already installed" in run("make")
    (rollback,) = [line for line in shown.splitlines() if line.startswith("== to take every byte back: ")]
    run("bash", "-c", rollback.removeprefix("== to take every byte back: "))
    assert snapshot(clone / ".quickstart" / "vllm-0.33.0") == snapshot(release)
    assert "nothing to roll back" in run("bash", "-c", rollback.removeprefix("== to take every byte back: "))
