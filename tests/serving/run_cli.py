"""`deepinfer` on a machine that says it has an A100: `python run_cli.py ARGUMENTS`."""

from __future__ import annotations

import sys

from deepinfer_cli import app
from deepinfer_cli.validate import runner

A100 = {"name": "NVIDIA A100", "capability": [8, 0], "memory_bytes": 80 * 10**9, "count": 1}

if __name__ == "__main__":
    runner.probe = lambda python, path=(): {"torch": "1", "triton": "1", "gpu": A100}  # type: ignore[assignment]
    raise SystemExit(app.main(sys.argv[1:]))
