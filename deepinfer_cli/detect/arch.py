"""Which architectures an install is for: what this machine's GPUs are, or what `--arch` says."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer_cli.detect.gpu import SERVED, Gpu, GpuReport
from deepinfer_cli.errors import UnsupportedError, UsageError

JETSON_ORIN = (8, 7)


@dataclass(frozen=True, slots=True)
class ArchDecision:
    """Which architectures an install is for.

    Attributes:
        archs: such as `("sm80",)`, sorted.
        reason: why these, for people.
        ignored: GPUs that keep stock behaviour.
        warnings: what does not fit, one sentence each.
    """

    archs: tuple[str, ...]
    reason: str
    ignored: tuple[Gpu, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def resolve_archs(report: GpuReport, arch: str | None = None) -> ArchDecision:
    """Decides what to install for: `arch` when given, else every served GPU of this machine.

    Raises:
        UnsupportedError: no GPU (`gpu-not-found`), the driver does not answer (`gpu-driver-error`), or no GPU here
            is served (`arch-unsupported`).
        UsageError: `arch` is not the name of an architecture.
    """
    if arch is not None:
        return _requested(report, arch)
    if not report.gpus:
        raise _no_gpu(report)
    served = [gpu for gpu in report.gpus if gpu.served]
    ignored = tuple(gpu for gpu in report.gpus if not gpu.served)
    if not served:
        raise _none_served(report)
    archs = tuple(sorted({SERVED[gpu.capability] for gpu in served if gpu.capability}))
    reason = "; ".join(f"GPU {gpu.index} {gpu.name} is {gpu.arch}" for gpu in served)
    warnings = [f"GPU {gpu.index} {gpu.name} is ignored: {why_not(gpu)}" for gpu in ignored]
    if report.problem:
        warnings.append(f"not every GPU can be read: {report.problem}")
    return ArchDecision(archs, reason, ignored, tuple(warnings))


def why_not(gpu: Gpu) -> str:
    """Why the overlay does not serve this GPU."""
    if gpu.capability is None:
        return "its compute capability cannot be read (an old driver, or a lost GPU)"
    return _refusal(gpu.capability)


def _refusal(capability: tuple[int, int]) -> str:
    name = "sm{}{}".format(*capability)
    if capability == JETSON_ORIN:
        return f"{name} (Jetson Orin) has no compile gate in DeepInfer, and the 510 GB checkpoint does not fit its memory"
    if capability < (8, 0):
        return f"{name} is older than Ampere: no bf16 tensor cores, which every kernel here needs"
    if capability >= (9, 0):
        return f"{name} is newer than Ampere and Ada: stock vLLM has native kernels for it and is the better path"
    return f"{name} is not one of {', '.join(SERVED.values())}"


def arch_name(arch: str) -> str:
    """What `--arch` says, as sm80: also written SM80, 80 and 8.0.

    Raises:
        UsageError: it is not the name of an architecture.
        UnsupportedError: it is one that is not served (`arch-unsupported`).
    """
    digits = arch.strip().lower().removeprefix("sm").removeprefix("_").replace(".", "")
    if not digits.isdecimal() or len(digits) < 2:
        raise UsageError(
            f"--arch {arch!r} is not an architecture",
            code="arch-unknown",
            hint=f"one of {', '.join(SERVED.values())}",
        )
    capability = (int(digits[:-1]), int(digits[-1]))
    if capability not in SERVED:
        raise UnsupportedError(
            _refusal(capability), code="arch-unsupported", hint=f"served: {', '.join(SERVED.values())}"
        )
    return SERVED[capability]


def _requested(report: GpuReport, arch: str) -> ArchDecision:
    name = arch_name(arch)
    others = [gpu for gpu in report.gpus if gpu.arch != name]
    warnings = [
        f"--arch {name}, but GPU {gpu.index} of this machine is {gpu.name} ({gpu.arch or 'capability unknown'})"
        for gpu in others
    ]
    return ArchDecision((name,), f"--arch {name}", tuple(others), tuple(warnings))


def _no_gpu(report: GpuReport) -> UnsupportedError:
    hint = "to install for another machine's GPU, pass --arch sm80, sm86 or sm89"
    if report.problem:
        return UnsupportedError(
            f"the NVIDIA driver does not answer: {report.problem}", code="gpu-driver-error", hint=hint
        )
    return UnsupportedError("no NVIDIA GPU in this machine", code="gpu-not-found", hint=hint)


def _none_served(report: GpuReport) -> UnsupportedError:
    reasons = [f"GPU {gpu.index} {gpu.name}: {why_not(gpu)}" for gpu in report.gpus]
    unknown = all(gpu.capability is None for gpu in report.gpus)
    return UnsupportedError(
        "no GPU of this machine is served: " + "; ".join(dict.fromkeys(reasons)),
        code="arch-unsupported",
        hint="update the driver, or say which it is with --arch"
        if unknown
        else "to install for another machine's GPU, pass --arch sm80, sm86 or sm89",
    )
