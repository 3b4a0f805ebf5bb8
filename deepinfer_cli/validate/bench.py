"""Starts the measuring workers and collects their rows."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.detect.gpu import SERVED
from deepinfer_cli.errors import FailedError, UnsupportedError
from deepinfer_cli.overlay import closure, payload
from deepinfer_cli.validate import results, runner
from deepinfer_cli.validate.baselines import NAMES
from deepinfer_cli.validate.forced import code_name, forced_arch
from deepinfer_cli.validate.model import Level, Status
from deepinfer_cli.validate.ops import languages_of
from deepinfer_cli.validate.results import SCHEMA_VERSION, Row, commit, merge_environments
from deepinfer_cli.validate.runner import Crew, Job, WorkerEnd

PROVIDERS = NAMES
_FEW_CORES = 2


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure.

    Attributes:
        payload_root: the overlay.
        python: interpreter of the workers.
        ops: ops to measure.
        parent: folder of the target's `vllm`, for the stock baselines.
        torch_from: a vLLM 0.30 or 0.31 tree for the torch baseline; default the target.
        providers: which implementations.
        arch: forces this architecture's code on a newer card.
        timeout_s: for one case, the oracle and all implementations together.
        max_smem: only kernel variants of at most so many bytes of shared memory.
        tokens: only the cases of these sizes; empty means all.
    """

    payload_root: Path
    python: Path
    ops: tuple[str, ...]
    parent: Path | None = None
    torch_from: Path | None = None
    providers: tuple[str, ...] = PROVIDERS
    arch: str | None = None
    timeout_s: float = runner.DEFAULT_TIMEOUT_S
    max_smem: int | None = None
    tokens: tuple[int, ...] = ()


def measure(
    request: Request,
    on_row: Callable[[Row], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    on_op: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measures every op and returns the result file's content, which `on_op` gets too, as far as it is, after each op.

    Raises:
        UnsupportedError: no GPU, or not one whose code can be measured.
        FailedError: a worker loaded another overlay than it was asked to.
    """
    found = runner.probe(request.python)
    forced = _require_gpu(request, found)
    if on_note is not None:
        on_note(f"bench: {code_name(found['gpu'], forced)}")
    overlay = payload.load(request.payload_root)
    digest = overlay.digest
    environment: dict[str, Any] = {}
    kernels: dict[str, str] = {}
    rows: list[Row] = []
    arch = forced or SERVED[tuple(found["gpu"]["capability"])]
    at_once = _at_once(len(request.ops))
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as cache:
        jobs = [_job(request, op, digest, forced, arch, cache, at_once) for op in request.ops]
        for item in runner.side_by_side(jobs, _events, at_once):
            if "environment" in item:
                environment = merge_environments(environment, item["environment"])
            elif "row" in item:
                rows.append(item["row"])
                if on_row is not None:
                    on_row(item["row"])
            else:
                kernels[item["done"]] = closure.op_digest(overlay, item["done"])
                if on_op is not None:
                    on_op(_result(environment, rows, digest, kernels))
    return _result(environment, rows, digest, kernels)


def _at_once(ops: int) -> int:
    """How many workers run: they use the GPU in turns, but import and compile side by side."""
    cores = os.cpu_count() or 1
    return min(ops, cores // 2) if cores > _FEW_CORES else 1


def _result(
    environment: dict[str, Any], rows: list[Row], digest: str, kernels: dict[str, str]
) -> dict[str, Any]:
    keys = ("gpu", "driver", "cuda", "torch", "triton", "tilelang", "vllm")
    ordered = {key: environment.get(key) for key in keys}
    extra = {key: value for key, value in environment.items() if key not in ordered}
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    full = ordered | {"commit": commit(digest), "date": date} | extra | {results.KERNELS: dict(kernels)}
    return {"schema_version": SCHEMA_VERSION, "environment": full, "rows": list(rows)}


def _require_gpu(request: Request, found: dict[str, Any]) -> str | None:
    gpu = found.get("gpu")
    if "problem" in found or not found.get("torch") or not found.get("triton"):
        why = found.get("problem") or f"{request.python} has no torch or no triton"
        tiled = any("tilelang" in languages_of(request.payload_root, op) for op in request.ops)
        raise UnsupportedError(
            f"nothing can be measured: {why}",
            code="nothing-runnable",
            hint=f"name an interpreter that has torch{', triton and tilelang' if tiled else ' and triton'} with --python",
        )
    if gpu is None or "problem" in gpu:
        why = gpu["problem"] if gpu else "torch sees no CUDA GPU here"
        raise UnsupportedError(
            f"nothing can be measured: {why}",
            code="gpu-not-found",
            hint="run it on the machine that serves vLLM",
        )
    forced, problem = forced_arch(gpu, request.arch)
    if problem:
        raise UnsupportedError(
            f"nothing can be measured: {problem}",
            code="arch-unsupported",
            hint="pass --arch sm80 to measure the Ampere code on this card",
        )
    return forced


def _job(
    request: Request, op: str, digest: str, forced: str | None, arch: str, cache: str, at_once: int
) -> Job:
    body = {
        "task": "bench", "level": Level.NUMERICS.value, "payload": str(request.payload_root), "digest": digest,
        "op": op, "force_arch": forced, "arch": arch, "providers": list(request.providers),
        "languages": list(languages_of(request.payload_root, op)), "max_smem": request.max_smem,
        "tokens": list(request.tokens), "threads": max(1, (os.cpu_count() or 1) // at_once),
        "parent": str(request.parent) if request.parent else None,
        "torch_from": str(request.torch_from) if request.torch_from else None,
    }  # fmt: skip
    # what TileLang compiled can only be told while it does
    fresh = ("TILELANG_CACHE_DIR",)
    env = runner.shared_caches(cache)
    return Job(request.python, body, env, timeout_s=request.timeout_s, fresh=fresh)


def _events(job: Job, crew: Crew) -> Iterator[dict[str, Any]]:
    """Environments and rows of one op, and `done`; the case a worker dies in becomes a row, the rest start again."""
    cases: list[str] | None = None
    while True:
        planned: list[str] | None = None
        running: dict[str, Any] | None = None
        end = WorkerEnd(Status.RUNTIME_ERROR, "the worker said nothing")
        for event in runner.events(job, cases, crew):
            if isinstance(event, WorkerEnd):
                end = event
            elif event["event"] == "hello":
                runner.require_digest(job, event)
            elif event["event"] == "plan":
                planned = list(event["cases"])
            elif event["event"] == "start":
                running = event
            elif event["event"] == "case_done" and planned:
                planned.remove(event["case"])
                running = None
            elif event["event"] in ("environment", "row"):
                yield event
        if end.status is Status.PASSED:
            break
        if planned is None or running is None:
            raise FailedError(
                f"measuring {job.request['op']}: {end.reason}",
                code="worker-crashed",
                hint=end.stderr[-600:] or None,
            )
        yield {"row": _dead_row(job, running, end)}
        cases = [name for name in planned if name != running["case"]]
        if not cases:
            break
    yield {"done": job.request["op"]}


def _dead_row(job: Job, running: dict[str, Any], end: WorkerEnd) -> Row:
    return {
        "op": job.request["op"], "case": running["params"], "provider": "overlay", "codegen": "native",
        "timing": "graph", "latency_us": None, "bytes": None, "flops": None, "ceiling_fraction": None,
        "status": end.status.value, "arch": job.request["arch"], "ceiling": "copy", "roof": None,
        "reason": f"{end.reason}: {end.stderr[-300:]}",
    }  # fmt: skip
