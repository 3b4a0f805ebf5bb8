"""The GPUs of this machine through NVML, or `nvidia-smi` where NVML does not answer; never through torch."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

SERVED: dict[tuple[int, int], str] = {(8, 0): "sm80", (8, 6): "sm86", (8, 9): "sm89"}
_SMI_TIMEOUT_S = 20
_SMI_FIELDS = ("index", "name", "uuid", "compute_cap", "memory.total", "driver_version", "mig.mode.current")
# drivers before 495 do not know compute_cap, and answer the whole query with an error
_SMI_OLD_FIELDS = tuple(name for name in _SMI_FIELDS if name != "compute_cap")

Source = Literal["nvml", "nvidia-smi", "none"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver describes it; `name` is for display only.

    Attributes:
        index: NVML's index (PCI order).
        capability: compute capability, None when the driver is too old to say.
        memory_bytes: total memory as the driver says it, None when unknown; CUDA sees about 1 % less (`serve.memory.CUDA_SEES`).
        mig: MIG mode is on: processes see slices of this card.
    """

    index: int
    name: str
    uuid: str
    capability: tuple[int, int] | None
    memory_bytes: int | None
    mig: bool = False

    @property
    def arch(self) -> str | None:
        """`sm80` and the like, also for cards that are not served; None when unknown."""
        return None if self.capability is None else "sm{}{}".format(*self.capability)

    @property
    def served(self) -> bool:
        """Whether the overlay has kernels for it."""
        return self.capability in SERVED


@dataclass(frozen=True, slots=True)
class GpuReport:
    """What this machine has.

    Attributes:
        gpus: every GPU the driver lists, whatever CUDA_VISIBLE_DEVICES says.
        driver: driver version, or None.
        cuda_driver: highest CUDA version the driver runs, or None.
        source: who said so.
        problem: why nothing, or not everything, could be read.
        visible: the value of CUDA_VISIBLE_DEVICES, or None when it is not set.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver: str | None = None
    source: Source = "none"
    problem: str | None = None
    visible: str | None = None


def detect_gpus(environ: Mapping[str, str] | None = None) -> GpuReport:
    """Asks NVML, then `nvidia-smi`; never raises."""
    report = _from_nvml()
    if not report.gpus:
        second = _from_smi()
        if second.gpus or (second.problem and not report.problem):
            report = second
    environ = os.environ if environ is None else environ
    return replace(report, visible=environ.get("CUDA_VISIBLE_DEVICES"))


def _from_nvml() -> GpuReport:
    try:
        import pynvml
    except ImportError:
        return GpuReport()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuReport(problem=_nvml_problem(pynvml, error))
    try:
        return read_nvml(pynvml)
    except pynvml.NVMLError as error:
        return GpuReport(problem=str(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nvml_problem(nvml: Any, error: Exception) -> str | None:
    # no driver library at all is a machine without a GPU, not a fault
    if getattr(error, "value", None) in {nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_NOT_FOUND}:
        return None
    return str(error)


def read_nvml(nvml: Any) -> GpuReport:
    """Reads every GPU through an initialised pynvml module; a GPU that fails is reported, not fatal."""
    gpus: list[Gpu] = []
    problems: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_nvml_gpu(nvml, index))
        except nvml.NVMLError as error:
            problems.append(f"GPU {index}: {error}")
    cuda = _optional(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    return GpuReport(
        gpus=tuple(gpus),
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda_driver=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        source="nvml",
        problem="; ".join(problems) or None,
    )


def _nvml_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _optional(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = _optional(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        memory_bytes=None if memory is None else int(memory.total),
        mig=bool(mig and mig[0]),
    )


def _optional(nvml: Any, function: Any, *args: Any) -> Any:
    # MIG mode, memory on unified cards and the like are "not supported" on some devices
    try:
        return function(*args)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _from_smi() -> GpuReport:
    binary = shutil.which("nvidia-smi")
    if binary is None:
        return GpuReport()
    report = GpuReport()
    for fields in (_SMI_FIELDS, _SMI_OLD_FIELDS):
        command = [binary, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_SMI_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return GpuReport(problem=f"nvidia-smi: {error}")
        report = parse_smi(done.stdout, done.stderr, done.returncode, fields)
        if report.gpus or "compute_cap" not in done.stdout + done.stderr:
            break
    return report


def parse_smi(stdout: str, stderr: str, returncode: int, fields: Iterable[str] = _SMI_FIELDS) -> GpuReport:
    """The report in the output of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`."""
    names = list(fields)
    if returncode != 0:
        said = " ".join((stdout + " " + stderr).split())
        return GpuReport() if "No devices were found" in said else GpuReport(problem=f"nvidia-smi: {said}")
    gpus: list[Gpu] = []
    problems: list[str] = []
    driver = None
    for row in csv.reader(stdout.splitlines(), skipinitialspace=True):
        if len(row) != len(names):
            problems.extend([f"nvidia-smi: {' '.join(row)}"] if row and "No devices" not in row[0] else [])
            continue
        values = dict(zip(names, row, strict=True))
        if not values["index"].isdigit():
            problems.append(f"nvidia-smi: {' '.join(row)}")
            continue
        driver = values["driver_version"]
        gpus.append(_smi_gpu(values))
    return GpuReport(tuple(gpus), driver, None, "nvidia-smi" if gpus else "none", "; ".join(problems) or None)


def _smi_gpu(values: Mapping[str, str]) -> Gpu:
    major, _, minor = values.get("compute_cap", "").partition(".")
    memory = values["memory.total"].removesuffix(" MiB")
    return Gpu(
        index=int(values["index"]),
        name=values["name"],
        uuid=values["uuid"],
        capability=(int(major), int(minor)) if major.isdigit() and minor.isdigit() else None,
        memory_bytes=int(memory) * 2**20 if memory.isdigit() else None,
        mig=values["mig.mode.current"] == "Enabled",
    )
