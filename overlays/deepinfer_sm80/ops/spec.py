"""Shared vocabulary of the ops: a case, a tolerance, a launchable kernel variant."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tolerance:
    """How an output is compared with the oracle's; all zero means bit-exact (equal bytes, NaN at equal places)."""

    max_abs: float = 0.0
    max_rel: float = 0.0

    @property
    def bit_exact(self) -> bool:
        return self.max_abs == 0.0 and self.max_rel == 0.0


@dataclass(frozen=True)
class Case:
    """One workload of an op.

    Attributes:
        op: name of the op, such as `gather`.
        name: unique within the op; says what the case is for.
        suite: `smoke` (also run by the interpreter on a CPU) or `full` (adds to smoke).
        params: what `make_inputs` needs; also the JSON `case` of a benchmark row.
        gpu_only: too large or too slow for the interpreter.
        memory_bytes: device memory the case needs; it is skipped, and said so, on a smaller card.
    """

    op: str
    name: str
    suite: str = "smoke"
    params: Mapping[str, Any] = field(default_factory=dict)
    gpu_only: bool = False
    memory_bytes: int = 0

    @property
    def id(self) -> str:
        return f"{self.op}[{self.name}]"

    @property
    def seed(self) -> int:
        return zlib.crc32(self.id.encode())


@dataclass(frozen=True)
class Variant:
    """One way a Triton kernel can be launched; the compile gate builds each for each architecture it serves.

    Attributes:
        name: unique within the op.
        kernel: the `triton.jit` function.
        signature: argument name → Triton type (`*bf16`, `*u8`, `*i32`, `i32`, `i64`), constexprs left out.
        constexprs: argument name → value.
        num_warps, num_stages: launch options.
        archs: the architectures it may be launched on.
        aligned: arguments known to be divisible by 16 (what Triton specialises on).
        expects_mma: the kernel has a dot, and its code must hold a tensor-core instruction.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    archs: tuple[str, ...] = ("sm80", "sm86", "sm89")
    aligned: tuple[str, ...] = ()
    expects_mma: bool = False
