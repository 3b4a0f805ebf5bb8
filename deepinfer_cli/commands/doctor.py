"""`deepinfer doctor`: what this machine has, row by row, with what to do about it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.commands import common
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.arch import resolve_archs
from deepinfer_cli.detect.gpu import GpuReport, detect_gpus
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import DeepInferError, ExitCode
from deepinfer_cli.output import Output
from deepinfer_cli.render import joined, plural, size, table
from deepinfer_cli.result import ErrorItem, Result

_SPACE_BYTES = 50_000_000
_PROBE_TIMEOUT_S = 30
# asked of the target's interpreter, which may have no DeepInfer
_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in ("torch", "triton", "tilelang"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: found[name] = None
print(json.dumps({"python": sys.version.split()[0], "versions": found}))
"""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What `doctor` was asked to do."""

    where: TargetOptions = field(default_factory=TargetOptions)


@dataclass(frozen=True, slots=True)
class Row:
    """One check; status is `ok`, `warn` or `error`."""

    check: str
    status: str
    value: str
    hint: str = ""


def run(opts: DoctorOptions, out: Output) -> Result:
    """Runs every check; one that breaks is a row, not the end."""
    gpus = detect_gpus()
    rows = [*_guarded("GPU", lambda: _gpu(gpus)), *_guarded("driver", lambda: _driver(gpus))]
    target = None
    try:
        from deepinfer_cli.detect.vllm import find_target

        target = find_target(target=opts.where.target, python=opts.where.python)
        rows += _guarded("vLLM", lambda: _vllm(target))
        rows += _guarded("packages", lambda: _packages(target, gpus))
        rows += _guarded("overlay", lambda: _overlay(target, opts.where))
        rows += _guarded("running", lambda: _running(target))
        rows += _guarded("disk", lambda: _disk(target))
    except DeepInferError as error:
        rows.append(Row("vLLM", "error", error.message, error.hint or ""))
    except OSError as error:
        rows.append(Row("vLLM", "error", f"{error.filename}: {error.strerror or error}", "its permissions"))
    rows += _guarded("nvcc", _nvcc)
    rows += _guarded("caches", _caches)
    out.table(
        table(("Check", "Status", "Value", "Hint"), ((r.check, r.status, r.value, r.hint) for r in rows))
    )
    bad = [row for row in rows if row.status == "error"]
    warned = sum(row.status == "warn" for row in rows)
    out.line(", ".join((plural(len(rows), "check"), plural(len(bad), "error"), plural(warned, "warning"))))
    data = {
        "checks": [asdict(row) for row in rows],
        "gpu": common.gpu_data(gpus),
        "target": target and common.target_data(target),
    }
    errors = tuple(
        ErrorItem("doctor-check", f"{row.check}: {row.value}", row.hint or None) for row in bad if out.json
    )
    return Result("doctor", data, ExitCode.FAILED if bad else ExitCode.OK, errors)


def _guarded(name: str, probe: Callable[[], Iterable[Row]]) -> list[Row]:
    try:
        return list(probe())
    except Exception as error:
        return [Row(name, "warn", f"could not be checked: {error}")]


def _gpu(gpus: GpuReport) -> Iterator[Row]:
    for gpu in gpus.gpus:
        yield Row(f"GPU {gpu.index}", "ok" if gpu.served else "warn", common.gpu_text(gpu))
    try:
        decision = resolve_archs(gpus)
    except DeepInferError as error:
        yield Row("architecture", "error", error.message, error.hint or "")
    else:
        yield Row("architecture", "ok", joined(decision.archs), "; ".join(decision.warnings))
    if gpus.visible is not None:
        yield Row("CUDA_VISIBLE_DEVICES", "ok", gpus.visible or "empty: vLLM sees no GPU")


def _driver(gpus: GpuReport) -> Iterator[Row]:
    if gpus.driver:
        cuda = f", runs CUDA up to {gpus.cuda_driver}" if gpus.cuda_driver else ""
        yield Row("driver", "ok", f"{gpus.driver}{cuda} ({gpus.source})")
    if gpus.problem and gpus.gpus:
        yield Row("driver", "warn", gpus.problem)


def _vllm(target: Target) -> Iterator[Row]:
    yield Row(
        "vLLM",
        "ok",
        f"{target.version or 'unknown version'}, {target.kind.value}, {target.root}",
        target.reason,
    )
    for other in target.others:
        yield Row("another vLLM", "warn", str(other), "--target or --python says which one is meant")
    for text in target.notes:
        yield Row("note", "ok", text)


def _packages(target: Target, gpus: GpuReport) -> Iterator[Row]:
    from deepinfer_cli.detect.requirements import cuda_major, pins

    found = interpreter(target.python or Path(sys.executable))
    yield Row("Python", "ok", f"{found['python']}, {target.python or sys.executable}")
    wanted = pins(target.dist_info)
    for name, version in found["versions"].items():
        pin = wanted.get(name)
        if version is None:
            yield Row(name, "warn", "not installed", f"vLLM wants {name}{pin}" if pin else "")
        elif pin is not None and not pin.contains(version, prereleases=True):
            yield Row(name, "warn", version, f"vLLM {target.version} pins {name}{pin}")
        else:
            yield Row(name, "ok", version, f"vLLM pins {pin}" if pin else "")
    major = cuda_major(target.dist_info)
    if major and gpus.cuda_driver and int(gpus.cuda_driver.split(".")[0]) < major:
        yield Row(
            "CUDA",
            "error",
            f"the driver runs CUDA up to {gpus.cuda_driver}, this vLLM is built for CUDA {major}",
            "update the driver (580 or newer for CUDA 13)",
        )


def interpreter(python: Path) -> dict[str, Any]:
    """Versions of Python, torch, triton and tilelang in `python`, from metadata: nothing is imported."""
    import json

    done = subprocess.run(
        [str(python), "-I", "-c", _VERSIONS],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PROBE_TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _overlay(target: Target, where: TargetOptions) -> Iterator[Row]:
    from deepinfer_cli.overlay.inspect import inspect

    found = inspect(target)
    status = {"installed": "ok", "not-installed": "ok", "unrecorded": "warn"}.get(found.state, "error")
    hint = {"not-installed": "deepinfer install", "installed": ""}.get(found.state, "deepinfer status")
    yield Row("overlay", status, found.state, hint and hint + where.arguments)


def _running(target: Target) -> Iterator[Row]:
    from deepinfer_cli.detect.process import running

    pids = joined(str(process.pid) for process in running(target.root))
    hint = "it keeps the code it started with: restart it after install and rollback"
    yield Row("running vLLM", "ok", f"process {pids}" if pids else "none", hint if pids else "")


def _disk(target: Target) -> Iterator[Row]:
    from deepinfer_cli.overlay.state import free_bytes

    free = free_bytes(target.parent)
    few = free < _SPACE_BYTES
    yield Row("free disk", "warn" if few else "ok", size(free), "an install needs a few MB" if few else "")


def _nvcc() -> Iterator[Row]:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or (home and shutil.which(str(Path(home, "bin", "nvcc"))))
    if not nvcc:
        yield Row("nvcc", "warn", "not found", "TileLang kernels need it; set CUDA_HOME to a CUDA toolkit")
        return
    done = subprocess.run(
        [nvcc, "--version"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PROBE_TIMEOUT_S,
        check=True,
    )
    release = next((line for line in done.stdout.splitlines() if "release" in line), "").strip()
    headers = Path(nvcc).resolve().parent.parent / "include" / "cuda.h"
    there = headers.is_file()
    hint = "" if there else f"no headers beside it ({headers}): set CUDA_HOME to a whole toolkit"
    yield Row("nvcc", "ok" if there else "warn", f"{nvcc} {release}", hint)


def _caches() -> Iterator[Row]:
    from deepinfer_cli.paths import caches

    for cache in caches():
        yield Row(f"cache {cache.name}", "ok", f"{size(cache.size)}, {cache.folder}", cache.variable)
