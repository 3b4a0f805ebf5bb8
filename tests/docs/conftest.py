"""A reader's machine: vLLM 0.33.0 with the overlay in the environment, one without beside it, and no GPU."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepinfer_cli.output import Output
from tests.cli.conftest import Cli, Run, cli, gpus, plain_environment

__all__ = ["cli", "gpus", "plain_environment"]

# where the documents put things
PLACE = "/srv/demo"
# what else a shown line may start with, to be run here
PROGRAMS = {"deepinfer", "cp", "git", "python", "python3"}


@dataclass(frozen=True)
class Reader:
    """Types command lines in `folder`, which stands for `/srv/demo`."""

    folder: Path
    cli: Cli

    def types(self, command: str) -> Run:
        """Runs one line of a document: our commands in this process, all else in a shell."""
        command = command.replace(PLACE, str(self.folder))
        words = shlex.split(command)
        if words[0] == "deepinfer" and not set("|&;<>$`") & set(command):
            return self.cli(*words[1:])
        used = {part.split()[0] for part in command.replace("&&", "|").split("|")}
        assert used <= PROGRAMS, (
            f"teach this test {sorted(used - PROGRAMS)}, or mark the block (markdown.NEEDS)"
        )
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, check=False
        )
        return Run(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def reader(
    cli: Cli, real_release: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Reader:
    """A reader in an empty folder, whose Python imports a vLLM that has the overlay, and who says yes when asked."""
    folder = tmp_path / "demo"
    # the download that `--wheel` finds is not the user's own: nothing may be fetched, or written there
    kept = real_release("0.33.0", tmp_path / "home" / ".cache" / "deepinfer" / "wheels" / "0.33.0")
    for site in ("site-packages", "env"):
        shutil.copytree(kept, folder / site)
    assert cli("install", "--target", folder / "env", "--arch", "sm80", "--yes").code == 0
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder / "env"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # a reader sits at a terminal
    monkeypatch.setattr(Output, "confirm", lambda self, question: True)
    return Reader(folder, cli)
