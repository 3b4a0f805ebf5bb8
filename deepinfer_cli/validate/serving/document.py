"""The result file of a serving comparison, and what in it says that the servers were not as they should be."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from deepinfer_cli.overlay import payload
from deepinfer_cli.validate import environment, results
from deepinfer_cli.validate.results import Row
from deepinfer_cli.validate.serving import live, rows
from deepinfer_cli.validate.serving.drive import Measured
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


def result_rows(request: Request, measured: Measured) -> list[Row]:
    """The rows of all that was measured, each with what is known of the overlay in its server."""
    codegen = (request.arch or "unknown") if request.generate else ("native" if request.arch else "unknown")
    found = []
    for work in request.workloads():
        for side in request.sides:
            runs = [
                rows.of_run(work, one)
                for one in measured.outcomes
                if (one.bench.workload, one.bench.side) == (work, side)
            ]
            if runs:
                found.append(rows.row(work.kind, work.case, side.name, runs, codegen))
    case: dict[str, Any] = {
        name: measured.scored[name] for name in ("tokens", "pieces") if name in measured.scored
    }
    found += rows.score_rows(measured.scores, case, codegen)
    for one in found:
        one["overlay"] = {
            name: _overlay(name, measured) for name in (side.name for side in request.sides)
            if name in one["provider"].split(" against ")
        }  # fmt: skip
    return found


def _overlay(name: str, measured: Measured) -> dict[str, Any]:
    """Of a side's servers: the same in every start, or unknown."""
    starts = [server["overlay"] for server in measured.servers if server["name"] == name]
    if not starts:
        return live.unknown("the server was running already, and nothing outside it can tell").to_json()
    keys = ("state", "bound", "off", "arch", "forced")
    if any(one[key] != starts[0][key] for one in starts for key in keys):
        return live.unknown("its starts differ").to_json()
    return dict(starts[0])


def misled(request: Request, measured: Measured) -> list[str]:
    """Where a server of ours was not what it was started to be: a comparison of it says nothing."""
    found = []
    for server in measured.servers:
        overlay = server["overlay"]
        if overlay["state"] != live.LIVE:
            found.append(f"{server['name']}: the overlay was {overlay['state']} ({overlay['told_by']})")
        elif set(overlay["off"]) != set(server["switched_off"]):
            found.append(f"{server['name']}: switched off were {', '.join(overlay['off']) or 'no ops'}")
        elif set(overlay["bound"]) & set(server["switched_off"]):
            found.append(f"{server['name']}: bound although switched off")
    return list(dict.fromkeys(found))
