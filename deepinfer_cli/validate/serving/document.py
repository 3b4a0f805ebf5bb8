"""The result file of a serving comparison."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from deepinfer_cli.overlay import payload
from deepinfer_cli.validate import environment, results
from deepinfer_cli.validate.serving.drive import Measured, result_rows
from deepinfer_cli.validate.serving.plan import Request


def build(request: Request, measured: Measured, found: dict[str, Any]) -> dict[str, Any]:
    """The whole document, of whatever was measured so far.

    Args:
        found: what the interpreter answered (see `runner.probe`), and `payload`, the installed overlay.
    """
    return {
        "schema_version": results.SCHEMA_VERSION,
        "environment": _environment(request, measured, found),
        "serving": _serving(request, measured),
        "rows": result_rows(request, measured),
    }


def _environment(request: Request, measured: Measured, found: dict[str, Any]) -> dict[str, Any]:
    gpu = found.get("gpu") or {}
    digest = payload.load(Path(found["payload"])).digest if "payload" in found else None
    return {
        "gpu": gpu.get("name"), "gpus": gpu.get("count"), "driver": environment.driver_version(), "cuda": measured.versions.get("cuda"),
        "torch": found.get("torch"), "triton": found.get("triton"), "tilelang": found.get("tilelang"),
        "vllm": measured.versions.get("vllm") or found.get("vllm"),
        "commit": results.commit(digest) if digest else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def _serving(request: Request, measured: Measured) -> dict[str, Any]:
    order = "endpoints" if not request.started else "together" if request.together else "in turn"
    return {
        "model": "small random V4.1" if request.small else request.model,
        "serve_arguments": list(request.extra),
        "arch": request.arch,
        "order": order,
        "rounds": request.rounds,
        "runs": request.repeats,
        "seed": request.seed,
        "endpoints": [side.base_url for side in request.sides if side.base_url],
        "servers": measured.servers,
        "scored": measured.scored,
    }
