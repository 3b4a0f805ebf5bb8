"""Compiles every launchable kernel variant for an architecture, without a GPU, and judges the code.

Runs in a worker process that never had `TRITON_INTERPRET` set.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.validate.model import CaseResult, Level, Status

SMALL_SHARED_BYTES = 49_152
_REGISTERS_PER_SM = 65_536
_WARP_SIZE = 32
_RESERVED_SHARED_BYTES = 1_024

# instructions that no Ampere or Ada build may hold, and what each is
_FORBIDDEN = (
    (re.compile(r"\bwgmma\b"), "wgmma"),
    (re.compile(r"\bcp\.async\.bulk\b"), "cp.async.bulk"),
    (re.compile(r"\bcvt\.[\w.]*\be[45]m[23]x[24]\b"), "an fp8 conversion"),
    (re.compile(r"\bmbarrier\b"), "mbarrier"),
    (re.compile(r"\.target\s+sm_(?:9|1\d)\d"), "a target newer than sm_89"),
)
_MMA = re.compile(r"\bmma\.sync\.aligned\.m16n8k\d+")


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


@dataclass(frozen=True, slots=True)
class Build:
    """What ptxas and Triton say about one variant on one architecture."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    warps: int
    ctas_per_sm: int
    mma: bool


def compile_variant(variant: Any, arch: str) -> tuple[Build, tuple[str, ...]]:
    """Builds `variant` (an `ops.spec.Variant`) for `arch` and judges it.

    Returns:
        The build's figures, and the reasons why it may not be launched there; none when it may.

    Raises:
        Exception: whatever Triton or ptxas raises when it does not compile.
    """
    compiled = _triton_compile(variant, arch)
    ptx = str(compiled.asm["ptx"])
    shared = int(compiled.metadata.shared)
    registers, spills, stack = parse_ptxas(_assemble(ptx, arch))
    build = Build(
        registers=registers,
        shared_bytes=shared,
        spill_bytes=spills,
        stack_bytes=stack,
        warps=int(compiled.metadata.num_warps),
        ctas_per_sm=ctas_per_sm(LIMITS[arch], registers, shared, int(compiled.metadata.num_warps)),
        mma=bool(_MMA.search(ptx)),
    )
    return build, judge(build, ptx, arch, expects_mma=variant.expects_mma)


def run(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Emits one result per variant and architecture, and one per architecture for the small-variant promise."""
    op, max_smem = request["op"], request["max_smem"]
    module = importlib.import_module(f"deepinfer_sm80.ops.{op}.triton")
    todo = {
        f"{op}[{arch}:{variant.name}]": (variant, arch)
        for arch in request["archs"]
        for variant in module.variants(arch)
    }
    promises = [f"{op}[{arch}:small]" for arch in request["archs"]]
    plan = [name for name in (*todo, *promises) if request["cases"] is None or name in request["cases"]]
    emit({"event": "plan", "cases": plan})
    shared: dict[str, list[int]] = {arch: [] for arch in request["archs"]}
    for name, (variant, arch) in todo.items():
        if name not in plan and not set(promises) & set(plan):
            continue
        emit({"event": "start", "case": name})
        result = _result(name, op, variant, arch, max_smem)
        if not result.status.bad:
            shared[arch].append(result.extra["shared_bytes"])
        if name in plan:
            emit({"event": "result", "result": result.to_json()})
    for name, arch in zip(promises, request["archs"], strict=True):
        if name in plan:
            emit({"event": "start", "case": name})
            emit({"event": "result", "result": _promise(name, op, arch, shared[arch]).to_json()})


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


def _promise(name: str, op: str, arch: str, shared: list[int]) -> CaseResult:
    smallest = min(shared, default=None)
    if smallest is not None and smallest <= SMALL_SHARED_BYTES:
        return CaseResult(name, op, Level.COMPILE, Status.PASSED, extra={"shared_bytes": smallest})
    found = "no variant passes" if smallest is None else f"the smallest variant takes {smallest:,} B"
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
    per_warp = -(-max(registers, 1) * _WARP_SIZE // 256) * 256
    by_registers = _REGISTERS_PER_SM // per_warp // 4 * 4 // warps
    per_cta = -(-(shared_bytes + _RESERVED_SHARED_BYTES) // 128) * 128
    return min(limits.ctas_per_sm, by_warps, by_registers, limits.shared_per_sm // per_cta)


def parse_ptxas(log: str) -> tuple[int, int, int]:
    """Registers, spilled bytes (stores and loads) and stack bytes from `ptxas -v`.

    Raises:
        ValueError: the log does not say.
    """
    used = re.search(r"Used (\d+) registers", log)
    if used is None:
        raise ValueError(f"ptxas reported no registers: {log.strip()[-300:]}")
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    stack = re.search(r"(\d+) bytes stack frame", log)
    return int(used[1]), spills, int(stack[1]) if stack else 0


def _triton_compile(variant: Any, arch: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = variant.kernel
    names = list(kernel.arg_names)
    missing = set(names) - set(variant.signature) - set(variant.constexprs)
    if missing:
        raise ValueError(f"variant {variant.name} names no type for {sorted(missing)}")
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(variant.constexprs), attrs=attrs)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", LIMITS[arch].capability, 32), options=options)


def ptxas_path() -> Path | None:
    """The assembler in Triton's package, or None."""
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__path__[0]) / "bin" / "ptxas"
    return path if path.exists() else None


def _assemble(ptx: str, arch: str) -> str:
    ptxas = ptxas_path()
    if ptxas is None:
        raise FileNotFoundError("triton's package holds no ptxas")
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            str(ptxas), "-v", f"--gpu-name=sm_{LIMITS[arch].capability}", str(source), "-o", str(source) + ".o",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()[-500:]}")
    return done.stderr + done.stdout
