"""The rows of `deepinfer doctor` on the machine and the vLLM that is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepinfer_cli.commands import common
from deepinfer_cli.commands.doctor_row import Row, Status
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect import cuda, host
from deepinfer_cli.detect.arch import resolve_archs
from deepinfer_cli.detect.gpu import GpuReport
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import DeepInferError
from deepinfer_cli.render import joined, size

_SPACE_BYTES = 50_000_000
# compiled kernels of one model and its CUDA graphs' sources take some hundred MB
_CACHE_BYTES = 1_000_000_000


def gpu_rows(gpus: GpuReport) -> Iterator[Row]:
    """Every GPU, the architectures they make, and what is visible."""
    for gpu in gpus.gpus:
        yield Row(f"GPU {gpu.index}", "ok" if gpu.served else "note", common.gpu_text(gpu))
    try:
        decision = resolve_archs(gpus)
    except DeepInferError as error:
        yield Row("architecture", "problem", error.message, error.hint or "")
    else:
        yield Row("architecture", "ok", joined(decision.archs), "; ".join(decision.warnings))
    if len({gpu.capability for gpu in gpus.gpus}) > 1:
        yield Row("mixed GPUs", "note", "this machine has cards of several kinds: one vLLM should run on one kind",
                  "CUDA_VISIBLE_DEVICES chooses them")  # fmt: skip
    if gpus.visible is not None:
        yield Row("CUDA_VISIBLE_DEVICES", "ok", gpus.visible or "empty: vLLM sees no GPU")


def driver_rows(gpus: GpuReport) -> Iterator[Row]:
    """The driver, and what of it does not answer."""
    if gpus.driver:
        most = f", runs CUDA up to {gpus.cuda_driver}" if gpus.cuda_driver else ""
        yield Row("driver", "ok", f"{gpus.driver}{most} ({gpus.source})")
    if gpus.problem and gpus.gpus:
        yield Row("driver", "note", gpus.problem)


def vllm_rows(target: Target) -> Iterator[Row]:
    """Which vLLM, and what else is visible."""
    what = f"{target.version or 'unknown version'}, {target.kind.value}, {target.root}"
    yield Row("vLLM", "ok", what, target.reason)
    for other in target.others:
        yield Row("another vLLM", "note", str(other), "--target or --python says which one is meant")
    for text in target.notes:
        yield Row("note", "ok", text)


def package_rows(target: Target, found: dict[str, Any], gpus: GpuReport) -> Iterator[Row]:
    """Python, torch, triton and tilelang against what this vLLM pins, and the driver against torch's CUDA."""
    from deepinfer_cli.detect.requirements import pins

    if not found:
        return
    yield Row("Python", "ok", ", ".join(text for text in (found["python"], found.get("path")) if text))
    wanted = pins(target.dist_info)
    for name, version in found["versions"].items():
        pin = wanted.get(name)
        if version is None:
            yield Row(name, "note", "not installed", f"vLLM wants {name}{pin}" if pin else "")
        elif pin is not None and not pin.contains(version, prereleases=True):
            yield Row(name, "note", version, f"vLLM {target.version} pins {name}{pin}")
        else:
            yield Row(name, "ok", version, f"vLLM pins {pin}" if pin else "")
    yield from _cuda(target, found, gpus)


def _cuda(target: Target, found: dict[str, Any], gpus: GpuReport) -> Iterator[Row]:
    from deepinfer_cli.detect.requirements import cuda_major

    runtime = cuda.torch_cuda(found.get("torch_version_py"), found["versions"].get("torch"))
    if runtime is not None:
        major = int(runtime.split(".")[0])
        wrong = cuda.driver_problem(gpus.driver, gpus.cuda_driver, runtime)
        if wrong is not None:
            status: Status = "problem" if wrong[0] == "problem" else "note"
            yield Row("CUDA", status, wrong[1], cuda.driver_hint(major))
        else:
            runs = f", the driver runs {gpus.cuda_driver or gpus.driver}" if gpus.driver else ""
            yield Row("CUDA", "ok", f"torch is built for {runtime}{runs}")
        return
    built = cuda_major(target.dist_info)
    if built and gpus.cuda_driver and int(gpus.cuda_driver.split(".")[0]) < built:
        yield Row(
            "CUDA",
            "problem",
            f"the driver runs CUDA up to {gpus.cuda_driver}, this vLLM is built for CUDA {built}",
            cuda.driver_hint(built),
        )


def overlay_rows(target: Target, where: TargetOptions) -> Iterator[Row]:
    """The state of the overlay."""
    from deepinfer_cli.overlay import manifest
    from deepinfer_cli.overlay.inspect import inspect

    found = inspect(target)
    states: dict[str, Status] = {"installed": "ok", "not-installed": "ok", "unrecorded": "note"}
    lost = manifest.load().enable & set(found.skip)
    if lost and found.state in states:
        text = f"{found.state}, without {joined(sorted(lost))}"
        yield Row("overlay", "problem", text, "without it the model does not run on this GPU family")
        return
    hint = {"not-installed": "deepinfer install", "installed": ""}.get(found.state, "deepinfer status")
    yield Row("overlay", states.get(found.state, "problem"), found.state, hint and hint + where.arguments)


def running_rows(target: Target) -> Iterator[Row]:
    """Processes that have this vLLM loaded."""
    from deepinfer_cli.detect.process import running

    pids = joined(str(process.pid) for process in running(target.root))
    hint = "it keeps the code it started with: restart it after install and rollback"
    yield Row("running vLLM", "ok", f"process {pids}" if pids else "none", hint if pids else "")


def disk_rows(target: Target) -> Iterator[Row]:
    """Room for an install."""
    from deepinfer_cli.overlay.state import free_bytes

    free = free_bytes(target.parent)
    few = free < _SPACE_BYTES
    yield Row("free disk", "note" if few else "ok", size(free), "an install needs a few MB" if few else "")


def nvcc_rows(found: dict[str, Any]) -> Iterator[Row]:
    """The nvcc and the headers that TileLang would take, by its own lookup in the target's interpreter."""
    if not found:
        return
    home = found.get("cuda_home")
    kit = cuda.toolkit(Path(home) if home else None)
    how = "TileLang kernels need it: set CUDA_HOME to a whole CUDA toolkit"
    if kit.problem:
        yield Row("nvcc", "note", kit.problem, how)
        return
    runtime = cuda.torch_cuda(found.get("torch_version_py"), found["versions"].get("torch"))
    text = f"{kit.release}, headers {kit.headers}, {kit.home}"
    if runtime and kit.release and runtime.split(".")[0] != kit.release.split(".")[0]:
        yield Row(
            "nvcc",
            "note",
            f"{text}; torch is built for CUDA {runtime}",
            "CUDA_HOME of the same major version",
        )
        return
    yield Row("nvcc", "ok", text)


def cache_rows() -> Iterator[Row]:
    """The compile caches, and the room on their disks."""
    from deepinfer_cli.paths import caches

    for cache in caches():
        free = host.free_bytes(cache.folder)
        text = f"{size(cache.size)}, {cache.folder}, {size(free)} free"
        if not host.writable(cache.folder):
            yield Row(f"cache {cache.name}", "problem", f"{text}, not writable: kernels are compiled at every start or not at all",
                      f"{cache.variable} names another folder")  # fmt: skip
        elif free < _CACHE_BYTES:
            yield Row(
                f"cache {cache.name}",
                "note",
                f"{text}: little for compiled kernels",
                f"{cache.variable} names another folder",
            )
        else:
            yield Row(f"cache {cache.name}", "ok", text, cache.variable)
