"""Holds a plan against the planner of the vLLM that is installed: the same bytes, asked in a child of its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer_cli.detect.target import Target
from deepinfer_cli.planner import kv
from deepinfer_cli.serve.memory import GIB, Estimate, Load

CHILD = Path(__file__).with_name("vllm_child.py")
# importing vLLM takes a while
TIMEOUT_S = 120.0


def request(found: Estimate, load: Load) -> dict[str, Any]:
    """What the child is asked about a layout: the model's shape, the stages' layers, and the bytes that each has."""
    stages = [list(layers) for layers in kv.stages(load.model, found.layout.partition)]
    if load.speculative:
        stages[-1] += range(load.model.layers, load.model.layers + load.model.draft_layers)
    rings = [
        page.tokens for page in kv.pages(load.model, load.block_size, load.speculative) if page.kind == "ring"
    ]
    return {
        "shape": asdict(load.model),
        "traffic": asdict(load.traffic),
        "tp": found.layout.tp,
        "stages": stages,
        "available": [int((found.usable - stage.total) * GIB) for stage in found.stages],
        "ring_rows": max(rings, default=8),
    }


def ask(target: Target, found: Estimate, load: Load, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """What vLLM's planner says: `blocks`, `tokens`, `concurrency` and whether they agree; `error` where it cannot be asked."""
    python = target.python or Path(sys.executable)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(target.parent), os.environ.get("PYTHONPATH")]))
    }
    with tempfile.TemporaryDirectory(prefix="deepinfer-plan-") as folder:
        file = Path(folder, "request.json")
        file.write_text(json.dumps(request(found, load)), encoding="utf-8")
        try:
            done = subprocess.run(
                [str(python), str(CHILD), str(file)],
                capture_output=True, text=True, timeout=timeout_s, check=False, cwd=folder, env=env,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}
    lines = done.stdout.strip().splitlines()
    try:
        answer: dict[str, Any] = dict(json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": last}
    if "error" in answer:
        return answer
    same = (found.pool.blocks, found.pool.tokens) == (answer["blocks"], answer["tokens"])
    return answer | {"agrees": same}
