"""Shared vocabulary of the ops: a case, a tolerance, a launchable kernel variant."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Tolerance:
    """How an output is compared with the oracle's; all zero means bit-exact (equal bytes, NaN at equal places).

    An element fails if it is off by more than `max_abs` and by more than `max_rel` of the oracle's value.
    """

    kind: ClassVar[str] = "plain"
    max_abs: float = 0.0
    max_rel: float = 0.0

    @property
    def bit_exact(self) -> bool:
        return self.max_abs == 0.0 and self.max_rel == 0.0

    def for_case(self, case: Case) -> Tolerance:
        """What holds for `case`."""
        return self


@dataclass(frozen=True)
class SparseTolerance:
    """The rule for sparse attention: one bf16 rounding of P, one of the output, and nothing else.

    `expected` returns the output in float64, not yet rounded, and beside `out` its companion `out:bound`, float64 of
    the same shape: |out| + sum_i p_i |kv_i|. Where the op must write nothing the companion is 0 and `out` the sentinel.

    Attributes:
        factor, floor: an element may be off by `factor * bound + floor`.
        cosine: limit of 1 - 2 sum(got * want) / sum(got^2 + want^2), over the elements whose bound is not 0.
        max_abs: a limit of its own for every element, for cases whose params hold `max_abs`.
        dtype: what the kernel's output must be.
    """

    kind: ClassVar[str] = "sparse"
    bit_exact: ClassVar[bool] = False
    factor: float = 1.05 * 2.0**-8
    floor: float = 1e-6
    cosine: float = 1e-5
    max_abs: float | None = None
    dtype: str = "bfloat16"

    def for_case(self, case: Case) -> SparseTolerance:
        """What holds for `case`."""
        return dataclasses.replace(self, max_abs=case.params.get("max_abs", self.max_abs))


@dataclass(frozen=True)
class UlpTolerance:
    """The rule for bf16 outputs of fp32 arithmetic: the oracle rounded to bf16, or a neighbour of it.

    Attributes:
        max_ulp: how many bf16 values an element may be away; -0 and 0 are one value.
        equal_ratio: the share of elements that must be equal.
    """

    kind: ClassVar[str] = "ulp"
    bit_exact: ClassVar[bool] = False
    max_ulp: int = 1
    equal_ratio: float = 0.999

    def for_case(self, case: Case) -> UlpTolerance:
        """What holds for `case`."""
        return self


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


def case_maker(op: str) -> Callable[..., Case]:
    """Makes cases of `op` from a name, a suite if it is not smoke, and keywords: a case's own, and what becomes its params."""

    def make(
        name: str, suite: str = "smoke", *, gpu_only: bool = False, memory_bytes: int = 0, **params: Any
    ) -> Case:
        return Case(op, name, suite, params, gpu_only, memory_bytes)

    return make


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
        measured: what was measured that put the variant into the table, in words.
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
    measured: str = ""


@dataclass(frozen=True)
class TileVariant:
    """One TileLang kernel that can be launched; the compile gate lowers it for each architecture it serves.

    Attributes:
        name: unique within the payload: compiled kernels are kept by it.
        build: makes the TIR function (`tvm.tir.PrimFunc`); imports TileLang when called, not before.
        archs: the architectures it may be launched on.
        expects_mma: the kernel has a dot, and its code must hold a tensor-core instruction.
        pass_configs: TileLang pass configuration (`tilelang.PassConfigKey` value → setting).
        measured: what was measured that put the variant into the table, in words.
    """

    name: str
    build: Callable[[], Any]
    archs: tuple[str, ...] = ("sm80", "sm86", "sm89")
    expects_mma: bool = False
    pass_configs: Mapping[str, Any] = field(default_factory=dict)
    measured: str = ""
