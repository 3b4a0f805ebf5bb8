"""Every launchable variant compiles for every architecture, into the instructions it is meant to have."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ops.catalog import ARCHS, LANGUAGES, OPS
from tests.ops.compiled import Once, code_of
from tests.validate.conftest import toolkit_missing

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels
NO_TILELANG = toolkit_missing()
# ops that multiply by scales as small as 2^-127, which is a subnormal
DECODERS = ("gather", "sparse_decode", "engram", "indexer_prefill", "indexer_decode")
# ops with a dot: some variant of each has to say so
MULTIPLIERS = (
    "sparse_decode",
    "sparse_prefill",
    "mhc_pre_delayed",
    "mhc_fused_post_pre_delayed",
    "indexer_prefill",
    "indexer_decode",
)


def launchable() -> Iterator[Any]:
    """A test for each variant and architecture; what several ops launch is compiled once."""
    from deepinfer_cli.validate.compile_gate import variants_of

    done = set()
    for op in OPS:
        for arch in ARCHS:
            for variant in variants_of(op, LANGUAGES[op], arch):
                tiled = hasattr(variant, "build")
                name = variant.name if tiled else f"{op}-{variant.name}"
                if (name, arch) in done:
                    continue
                done.add((name, arch))
                marks = [pytest.mark.skipif(NO_TILELANG != "", reason=NO_TILELANG)] if tiled else []
                yield pytest.param(op, variant, arch, id=f"{name}-{arch}", marks=marks)


@pytest.mark.parametrize(("op", "variant", "arch"), list(launchable()))
def test_variant(op: str, variant: Any, arch: str, once: Once) -> None:
    from deepinfer_cli.validate import artifact, compile_gate

    code = code_of(once, variant, arch) if hasattr(variant, "build") else artifact.make(variant, arch)
    build = compile_gate.build_of(code, arch)
    assert compile_gate.judge(build, code.ptx, arch, expects_mma=variant.expects_mma) == ()
    assert build.spill_bytes == 0
    assert "e4m3x2" not in code.ptx
    if op.startswith("mhc_"):
        assert build.shared_bytes <= compile_gate.SMALL_SHARED_BYTES
    if hasattr(variant, "build"):
        # what a kernel is refused for is known before it is compiled, and must not be less than what it needs then
        assert build.shared_bytes <= bytes_of_arrays(op, variant.name)
    if op in DECODERS:
        assert not re.search(r"mul\.\w*\.?ftz", code.ptx)


@functools.cache
def bytes_of_arrays(op: str, name: str) -> int:
    """Of the shared arrays of a TileLang variant, which are the same for every architecture."""
    from deepinfer_sm80 import tile

    from deepinfer_cli.validate.compile_gate import variants_of

    (variant,) = {
        one.name: one for arch in ARCHS for one in variants_of(op, ["tilelang"], arch) if one.name == name
    }.values()
    return tile.shared_bytes(variant.build())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", ARCHS)
def test_variants_have_names_of_their_own_and_say_where_they_multiply(op: str, arch: str) -> None:
    from deepinfer_cli.validate.compile_gate import variants_of

    variants = variants_of(op, LANGUAGES[op], arch)
    assert variants and all(arch in variant.archs for variant in variants)
    assert any(variant.expects_mma for variant in variants) is (op in MULTIPLIERS)


def compiled(variant: Any) -> str:
    from deepinfer_cli.validate import artifact

    return str(artifact.compile_triton(variant, "sm80").asm["ptx"])


def test_wide_variants_move_sixteen_bytes() -> None:
    from deepinfer_sm80.ops.combine import triton as combine
    from deepinfer_sm80.ops.gather import triton as gather

    gather_ptx = compiled(gather.WIDE)
    assert widths(gather_ptx, "st") == {"v4.b32"}
    # eight codes per thread become the sixteen bytes that it stores
    assert "v2.b32" in widths(gather_ptx, "ld")
    combine_ptx = compiled(combine.variants("sm80")[0])
    assert "v4.b32" in widths(combine_ptx, "ld") & widths(combine_ptx, "st")


def test_gather_rounds_in_pairs() -> None:
    from deepinfer_sm80.ops.gather import triton as gather

    ptx = compiled(gather.WIDE)
    assert "cvt.rn.bf16x2.f32" in ptx
    assert "cvt.rn.bf16.f32" not in ptx


def widths(ptx: str, direction: str) -> set[str]:
    return set(re.findall(rf"\b{direction}\.global\.(?:[a-z_:0-9]+\.)*?((?:v\d\.)?b\d+)", ptx))
