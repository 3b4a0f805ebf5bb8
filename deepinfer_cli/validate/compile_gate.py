"""Compiles every launchable kernel variant for an architecture, without a GPU, and judges the code.

Runs in a worker process that never had `TRITON_INTERPRET` set.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_cli.validate import artifact
from deepinfer_cli.validate.model import CaseResult, Level, Status

SMALL_SHARED_BYTES = 49_152
_REGISTERS_PER_SM = 65_536
_RESERVED_SHARED_BYTES = 1_024

# instructions that no Ampere or Ada build may hold, and what each is
_FORBIDDEN = (
    (re.compile(r"\bwgmma\b"), "wgmma"),
    (re.compile(r"\bcp\.async\.bulk\b"), "cp.async.bulk"),
    (re.compile(r"\bcvt\.[\w.]*\be[45]m[23]x[24]\b"), "an fp8 conversion"),
    (re.compile(r"\bmbarrier\b"), "mbarrier"),
    (re.compile(r"\.target\s+sm_(?:9|1\d)\d"), "a target newer than sm_89"),
)
# bf16 and fp16 products, and tf32 ones
_MMA = re.compile(r"\bmma\.sync\.aligned\.(?:m16n8k16\.|m16n8k8\.row\.col\.f32\.tf32)")


@dataclass(frozen=True, slots=True)
class ArchLimits:
    """What one SM of an architecture holds (CUDA programming guide, compute capabilities)."""

    capability: int
    shared_per_cta: int
    shared_per_sm: int
    warps_per_sm: int
    ctas_per_sm: int


LIMITS = {
    "sm80": ArchLimits(80, 166_912, 167_936, 64, 32),
    "sm86": ArchLimits(86, 101_376, 102_400, 48, 16),
    "sm89": ArchLimits(89, 101_376, 102_400, 48, 24),
}


# whether a dot is meant → bytes of shared memory
Shared = dict[bool, list[int]]


@dataclass(frozen=True, slots=True)
class Build:
    """What the compilers say about one variant on one architecture."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    warps: int
    ctas_per_sm: int
    mma: bool


def compile_variant(variant: Any, arch: str) -> tuple[Build, tuple[str, ...]]:
    """Builds `variant` (an `ops.spec.Variant` or `TileVariant`) for `arch` and judges it.

    Returns:
        The build's figures, and the reasons why it may not be launched there; none when it may.

    Raises:
        Exception: whatever a compiler raises when it does not compile.
    """
    code = artifact.make(variant, arch)
    build = build_of(code, arch)
    return build, judge(build, code.ptx, arch, expects_mma=variant.expects_mma)


def build_of(code: artifact.Code, arch: str) -> Build:
    """The figures of a compiled variant."""
    return Build(
        registers=code.registers,
        shared_bytes=code.shared_bytes,
        spill_bytes=code.spill_bytes,
        stack_bytes=code.stack_bytes,
        warps=code.warps,
        ctas_per_sm=ctas_per_sm(LIMITS[arch], code.registers, code.shared_bytes, code.warps),
        mma=bool(_MMA.search(code.ptx)),
    )


def variants_of(op: str, languages: Iterable[str], arch: str) -> tuple[Any, ...]:
    """Every variant of the op that may be launched on `arch`, from its `triton.py` and `tilelang.py`.

    Raises:
        ValueError: two of them have one name.
    """
    found = [
        variant
        for language in languages
        for variant in importlib.import_module(f"deepinfer_sm80.ops.{op}.{language}").variants(arch)
    ]
    names = [variant.name for variant in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{op} has variants of equal name: {', '.join(sorted(names))}")
    return tuple(found)


def run(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Emits one result per variant and architecture, and one per architecture for the small-variant promise."""
    op, max_smem, languages = request["op"], request["max_smem"], request["languages"]
    todo = {
        f"{op}[{arch}:{variant.name}]": (variant, arch)
        for arch in request["archs"]
        for variant in variants_of(op, languages, arch)
    }
    promises = [f"{op}[{arch}:small]" for arch in request["archs"]]
    plan = [name for name in (*todo, *promises) if request["cases"] is None or name in request["cases"]]
    emit({"event": "plan", "cases": plan})
    # per architecture: shared memory of what passes, kernels with a dot apart from those without
    shared: dict[str, Shared] = {arch: {} for arch in request["archs"]}
    for name, (variant, arch) in todo.items():
        if name not in plan and not set(promises) & set(plan):
            continue
        emit({"event": "start", "case": name})
        result = _result(name, op, variant, arch, max_smem)
        sizes = shared[arch].setdefault(variant.expects_mma, [])
        if not result.status.bad:
            sizes.append(result.extra["shared_bytes"])
        if name in plan:
            emit({"event": "result", "result": result.to_json()})
    for name, arch in zip(promises, request["archs"], strict=True):
        if name in plan:
            emit({"event": "start", "case": name})
            result = _promise(name, op, arch, shared[arch], complete=request.get("complete", True))
            emit({"event": "result", "result": result.to_json()})


def _result(name: str, op: str, variant: Any, arch: str, max_smem: int | None) -> CaseResult:
    began = time.perf_counter()
    try:
        build, faults = compile_variant(variant, arch)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:2000]
        return CaseResult(
            name, op, Level.COMPILE, Status.COMPILE_ERROR, reason, duration_s=time.perf_counter() - began
        )
    status, reason = (Status.FAILED, "; ".join(faults)) if faults else (Status.PASSED, "")
    if not faults and max_smem is not None and build.shared_bytes > max_smem:
        status, reason = (
            Status.SKIPPED,
            f"{build.shared_bytes:,} B of shared memory, more than --max-smem {max_smem:,}",
        )
    return CaseResult(
        name, op, Level.COMPILE, status, reason, duration_s=time.perf_counter() - began, extra=asdict(build)
    )


def _promise(name: str, op: str, arch: str, shared: Shared, *, complete: bool) -> CaseResult:
    """Whether something small is there for every kind of kernel: a small helper excuses no large dot."""
    # a kind of which nothing passes has failed by itself
    needed = max((min(sizes) for sizes in shared.values() if sizes), default=None)
    if needed is not None and needed <= SMALL_SHARED_BYTES:
        return CaseResult(name, op, Level.COMPILE, Status.PASSED, extra={"shared_bytes": needed})
    if not complete:
        return CaseResult(name, op, Level.COMPILE, Status.SKIPPED, "not every variant could be built here")
    found = "no variant passes" if needed is None else f"the smallest variant takes {needed:,} B"
    reason = f"{found}, one of at most {SMALL_SHARED_BYTES:,} B of shared memory is promised"
    return CaseResult(name, op, Level.COMPILE, Status.FAILED, reason)


def judge(build: Build, ptx: str, arch: str, *, expects_mma: bool) -> tuple[str, ...]:
    """Why this build may not be launched on `arch`; empty when it may."""
    limit = LIMITS[arch].shared_per_cta
    faults = [f"the code holds {what}" for pattern, what in _FORBIDDEN if pattern.search(ptx)]
    if f".target sm_{LIMITS[arch].capability}" not in ptx:
        faults.append(f"the code is not for sm_{LIMITS[arch].capability}")
    if build.shared_bytes > limit:
        faults.append(f"{build.shared_bytes:,} B of shared memory, {arch} has {limit:,}")
    if build.spill_bytes:
        faults.append(f"{build.spill_bytes:,} B of register spills")
    if build.ctas_per_sm == 0:
        faults.append("not one CTA fits an SM")
    if expects_mma and not build.mma:
        faults.append("no mma.sync where a dot is meant")
    return tuple(faults)


def ctas_per_sm(limits: ArchLimits, registers: int, shared_bytes: int, warps: int) -> int:
    """How many CTAs of this size one SM holds at once."""
    by_warps = limits.warps_per_sm // warps
    # registers are handed out in units of 256 per warp, to four warps at a time
    per_warp = -(-max(registers, 1) * artifact.WARP_SIZE // 256) * 256
    by_registers = _REGISTERS_PER_SM // per_warp // 4 * 4 // warps
    per_cta = -(-(shared_bytes + _RESERVED_SHARED_BYTES) // 128) * 128
    return min(limits.ctas_per_sm, by_warps, by_registers, limits.shared_per_sm // per_cta)
