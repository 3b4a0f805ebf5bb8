"""The live level: `live.py` in the target's interpreter, with the gate on and with it off."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.validate.model import CaseResult, Level, NotRun, Status

LIVE = Path(__file__).with_name("live.py")
OP = "overlay"


@dataclass(frozen=True, slots=True)
class LiveJob:
    """What to import, and in which interpreter.

    Attributes:
        parent: folder to put first on the child's path; None where its interpreter finds vLLM itself.
        modules: hooked modules by import name.
        expect, skip: ops that must be bound, and those left to stock.
        force_arch: binds on a card that is not SM8x.
    """

    python: Path
    parent: Path | None
    layout: str
    modules: tuple[str, ...]
    expect: tuple[str, ...]
    skip: tuple[str, ...]
    force_arch: str | None
    timeout_s: float


def run(job: LiveJob) -> tuple[list[CaseResult], NotRun | None]:
    """Both checks; the second element says why there is no result where vLLM cannot be imported."""
    results: list[CaseResult] = []
    for mode in ("bound", "stock"):
        result = _check(job, mode)
        if isinstance(result, NotRun):
            return results, result
        results.append(result)
    return results, None


def _check(job: LiveJob, mode: str) -> CaseResult | NotRun:
    began = time.perf_counter()
    name = f"{OP}[{'bound' if mode == 'bound' else 'off with DEEPINFER_DISABLE=1'}]"
    status, answer, words = _ask(job, mode)
    duration = time.perf_counter() - began
    if status is not None:
        return CaseResult(name, OP, Level.LIVE, status, words, duration_s=duration)
    error = answer["error"]
    if error and error["stage"] == "import":
        return NotRun(
            Level.LIVE,
            f"{job.python} cannot import this vLLM ({error['kind']}: {error['message'].splitlines()[0][:200]})",
            "install vLLM's requirements there, or name the interpreter that serves vLLM with --python",
        )
    problems = [*answer["problems"], *([f"{error['kind']}: {error['message']}"] if error else [])]
    report = answer["report"] or {}
    extra = {
        "vllm_file": answer["vllm_file"],
        "payload_file": answer["payload_file"],
        "bound": report.get("bound", []),
    }
    return CaseResult(
        name, OP, Level.LIVE, Status.FAILED if problems else Status.PASSED, "; ".join(problems),
        duration_s=duration, extra=extra,
    )  # fmt: skip


def _ask(job: LiveJob, mode: str) -> tuple[Status | None, dict[str, Any], str]:
    """The child's answer; or a status and words where it gave none."""
    request = {
        "parent": str(job.parent) if job.parent else None, "layout": job.layout, "modules": list(job.modules),
        "expect": list(job.expect), "skipped": list(job.skip), "mode": mode,
    }  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    if job.force_arch:
        env["DEEPINFER_FORCE_ARCH"] = job.force_arch
    if mode == "stock":
        env["DEEPINFER_DISABLE"] = "1"
    # -B: a check leaves no bytecode in the target
    process = subprocess.Popen(
        [str(job.python), "-B", str(LIVE)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(json.dumps(request).encode(), timeout=job.timeout_s)
    except subprocess.TimeoutExpired:
        return Status.TIMEOUT, {}, f"no answer within {job.timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    try:
        answer: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Status.RUNTIME_ERROR, {}, f"exit code {process.returncode}: {' '.join(last)}"
    return None, answer, ""
