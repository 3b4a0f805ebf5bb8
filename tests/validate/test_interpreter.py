from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels
SCRIPT = Path(__file__).with_name("interpreted_kernels.py")


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], env=env, capture_output=True, text=True, check=False
    )


def test_the_repaired_interpreter_agrees_with_torch():
    done = _run()
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr[-2000:]


def test_the_stock_interpreter_does_not():
    """Otherwise the repair proves nothing and can go."""
    done = _run("--stock")
    assert done.returncode == 1
    assert "dot torch.bfloat16" in done.stdout and "cast" in done.stdout and "loop" in done.stdout
    assert "fma" in done.stdout
