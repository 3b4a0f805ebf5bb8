"""Every launchable variant compiles for every architecture, into the instructions it is meant to have."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels
OPS = ("gather", "combine")
ARCHS = ("sm80", "sm86", "sm89")


def launchable() -> Iterator[Any]:
    for op in OPS:
        module = importlib.import_module(f"deepinfer_sm80.ops.{op}.triton")
        for arch in ARCHS:
            yield from (
                pytest.param(variant, arch, id=f"{op}-{variant.name}-{arch}")
                for variant in module.variants(arch)
            )


@pytest.mark.parametrize(("variant", "arch"), list(launchable()))
def test_variant(variant: Any, arch: str) -> None:
    from deepinfer_cli.validate import compile_gate

    build, reasons = compile_gate.compile_variant(variant, arch)
    assert reasons == ()
    assert build.spill_bytes == 0
    assert build.shared_bytes <= compile_gate.SMALL_SHARED_BYTES
    ptx = compile_gate._triton_compile(variant, arch).asm["ptx"]
    assert "e4m3x2" not in ptx
    # a scale of 2^-127 is a subnormal
    assert not re.search(r"mul\.\w*\.?ftz", ptx)


def test_wide_variants_move_sixteen_bytes() -> None:
    from deepinfer_sm80.ops.combine import triton as combine
    from deepinfer_sm80.ops.gather import triton as gather

    from deepinfer_cli.validate import compile_gate

    gather_ptx = compile_gate._triton_compile(gather.WIDE, "sm80").asm["ptx"]
    assert widths(gather_ptx, "st") == {"v4.b32"}
    # eight codes per thread become the sixteen bytes that it stores
    assert "v2.b32" in widths(gather_ptx, "ld")
    combine_ptx = compile_gate._triton_compile(combine.variants("sm80")[0], "sm80").asm["ptx"]
    assert "v4.b32" in widths(combine_ptx, "ld") & widths(combine_ptx, "st")


def test_gather_rounds_in_pairs() -> None:
    from deepinfer_sm80.ops.gather import triton as gather

    from deepinfer_cli.validate import compile_gate

    ptx = compile_gate._triton_compile(gather.WIDE, "sm80").asm["ptx"]
    assert "cvt.rn.bf16x2.f32" in ptx
    assert "cvt.rn.bf16.f32" not in ptx


def widths(ptx: str, direction: str) -> set[str]:
    return set(re.findall(rf"\b{direction}\.global\.(?:[a-z_:0-9]+\.)*?((?:v\d\.)?b\d+)", ptx))
