"""One kernel variant as machine code for one architecture: made without a GPU, by Triton or by TileLang and nvcc."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.validate import toolkit

CAPABILITIES = {"sm80": 80, "sm86": 86, "sm89": 89}
WARP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Code:
    """What a compiler made of a variant.

    Attributes:
        ptx: its assembly.
        registers: of one thread.
        shared_bytes: shared memory of one CTA: declared in the code, and asked for by the launch.
        spill_bytes, stack_bytes: of one thread.
        warps: of one CTA.
    """

    ptx: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    warps: int


def make(variant: Any, arch: str) -> Code:
    """Compiles an `ops.spec.Variant` or `TileVariant` for `arch`.

    Raises:
        Exception: whatever Triton, TileLang, nvcc or ptxas raises when it does not compile.
    """
    return _from_triton(variant, arch) if hasattr(variant, "kernel") else _from_tilelang(variant, arch)


def _from_triton(variant: Any, arch: str) -> Code:
    compiled = compile_triton(variant, arch)
    ptx = str(compiled.asm["ptx"])
    registers, spills, stack, _declared = parse_ptxas(assemble(ptx, arch, ptxas_of_triton()))
    shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    return Code(ptx, registers, shared, spills, stack, warps)


def _from_tilelang(variant: Any, arch: str) -> Code:
    lowered = importlib.import_module("deepinfer_sm80.tile").lower(variant, arch)
    level = variant.pass_configs.get("tl.ptxas_register_usage_level")
    options = () if level is None else (f"--register-usage-level={int(level)}",)
    log = assemble(lowered.ptx, arch, toolkit.find("ptxas"), options)
    registers, spills, stack, declared = parse_ptxas(log)
    warps = -(-lowered.threads // WARP_SIZE)
    return Code(lowered.ptx, registers, declared + lowered.dynamic_shared, spills, stack, warps)


def compile_triton(variant: Any, arch: str) -> Any:
    """Triton's compiled kernel, specialised as the variant says and no further."""
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
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITIES[arch], WARP_SIZE), options=options)


def ptxas_of_triton() -> Path | None:
    """The assembler in Triton's package, or None."""
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__path__[0]) / "bin" / "ptxas"
    return path if path.exists() else None


def assemble(ptx: str, arch: str, ptxas: Path | None, options: tuple[str, ...] = ()) -> str:
    """What `ptxas -v` says about `ptx`.

    Raises:
        FileNotFoundError: there is no assembler.
        RuntimeError: it does not assemble.
    """
    if ptxas is None:
        raise FileNotFoundError("there is no ptxas beside this compiler")
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            str(ptxas),
            "-v",
            f"--gpu-name=sm_{CAPABILITIES[arch]}",
            *options,
            str(source),
            "-o",
            f"{source}.o",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()[-500:]}")
    return done.stderr + done.stdout


def parse_ptxas(log: str) -> tuple[int, int, int, int]:
    """Registers, spilled bytes (stores and loads), stack bytes and declared shared memory from `ptxas -v`.

    Raises:
        ValueError: the log does not say.
    """
    used = re.search(r"Used (\d+) registers", log)
    if used is None:
        raise ValueError(f"ptxas reported no registers: {log.strip()[-300:]}")
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    stack = re.search(r"(\d+) bytes stack frame", log)
    shared = re.search(r"(\d+) bytes smem", log)
    return int(used[1]), spills, int(stack[1]) if stack else 0, int(shared[1]) if shared else 0
