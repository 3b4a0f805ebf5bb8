"""`deepinfer` on a machine that says it has an A100, or with FAKE_GPU=h200 an H200: `python run_cli.py ARGUMENTS`."""

from __future__ import annotations

import os
import sys

from deepinfer_cli import app
from deepinfer_cli.validate import runner

A100 = {"name": "NVIDIA A100", "capability": [8, 0], "memory_bytes": 80 * 10**9, "count": 1}
H200 = {"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 140 * 10**9, "count": 1}

if __name__ == "__main__":
    card = H200 if os.environ.get("FAKE_GPU") == "h200" else A100
    runner.probe = lambda python, path=(): {"torch": "1", "triton": "1", "gpu": card}  # type: ignore[assignment]
    raise SystemExit(app.main(sys.argv[1:]))
