from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepinfer_cli.overlay import payload
from deepinfer_cli.validate import compile_gate, runner
from deepinfer_cli.validate.artifact import Code, parse_ptxas
from deepinfer_cli.validate.compile_gate import LIMITS, Build, ctas_per_sm, judge
from deepinfer_cli.validate.model import Status
from tests.validate.conftest import toolkit_missing

NO_TILELANG = toolkit_missing()
CLEAN = Build(
    registers=64, shared_bytes=16_384, spill_bytes=0, stack_bytes=0, warps=4, ctas_per_sm=4, mma=False
)
PTX = ".version 8.7\n.target sm_80\n"


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "want"),
    [
        pytest.param("sm80", 32, 0, 4, 16, id="warps-limit-an-a100"),
        pytest.param("sm86", 32, 0, 4, 12, id="fewer-warps-on-sm86"),
        pytest.param("sm80", 32, 0, 1, 32, id="ctas-limit-small-blocks"),
        pytest.param("sm86", 32, 0, 1, 16, id="sixteen-ctas-on-sm86"),
        pytest.param("sm80", 255, 0, 8, 1, id="registers-limit"),
        pytest.param("sm80", 64, 166_912, 4, 1, id="the-largest-shared-block-fits-once"),
        pytest.param("sm80", 64, 82_944, 4, 2, id="half-of-it-fits-twice"),
        pytest.param("sm86", 64, 101_376, 4, 1, id="the-largest-on-sm86"),
        pytest.param("sm86", 64, 102_400, 4, 0, id="one-more-kib-does-not-fit"),
    ],
)
def test_ctas_per_sm(arch, registers, shared, warps, want):
    assert ctas_per_sm(LIMITS[arch], registers, shared, warps) == want


def test_parse_ptxas_adds_spill_stores_and_loads():
    log = (
        "ptxas info    : Function properties for k\n"
        "    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 1040 bytes smem, 392 bytes cmem[0]\n"
    )
    assert parse_ptxas(log) == (255, 64, 16, 1040)
    assert parse_ptxas("ptxas info    : Used 9 registers") == (9, 0, 0, 0)


def test_parse_ptxas_refuses_a_log_without_registers():
    with pytest.raises(ValueError, match="no registers"):
        parse_ptxas("ptxas fatal")


def _replaced(**values) -> Build:
    from dataclasses import replace

    return replace(CLEAN, **values)


@pytest.mark.parametrize(
    ("build", "ptx", "fault"),
    [
        pytest.param(_replaced(spill_bytes=8), PTX, "8 B of register spills", id="spills"),
        pytest.param(
            _replaced(shared_bytes=166_913), PTX, "166,913 B of shared memory, sm80 has 166,912", id="shared"
        ),
        pytest.param(CLEAN, PTX + "wgmma.mma_async.sync", "the code holds wgmma", id="wgmma"),
        pytest.param(
            CLEAN, PTX + "cvt.rn.f16x2.e4m3x2 %r1, %rs1;", "the code holds an fp8 conversion", id="from-fp8"
        ),
        pytest.param(
            CLEAN, PTX + "cvt.rn.satfinite.e4m3x2.f32 %rs1;", "the code holds an fp8 conversion", id="to-fp8"
        ),
        pytest.param(CLEAN, PTX + "cp.async.bulk.tensor.2d", "the code holds cp.async.bulk", id="tma"),
        pytest.param(
            CLEAN, PTX.replace("80", "90a"), "the code holds a target newer than sm_89", id="target"
        ),
        pytest.param(CLEAN, PTX.replace("80", "86"), "the code is not for sm_80", id="other-target"),
    ],
)
def test_judge_names_the_fault(build, ptx, fault):
    assert fault in judge(build, ptx, "sm80", expects_mma=False)


@pytest.mark.parametrize(
    ("instruction", "mma"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};", True),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1};", True),
        ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1};", False),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%fd1};", False),
    ],
)
def test_the_tensor_core_instructions_that_are_meant(monkeypatch, instruction, mma):
    code = Code(PTX + instruction, 64, 1024, 0, 0, 4)
    monkeypatch.setattr(compile_gate.artifact, "make", lambda variant, arch: code)
    build, reasons = compile_gate.compile_variant(SimpleNamespace(expects_mma=True), "sm80")
    assert build.mma is mma
    assert reasons == (() if mma else ("no mma.sync where a dot is meant",))


def test_judge_wants_a_tensor_core_instruction_where_a_dot_is_meant():
    assert judge(CLEAN, PTX, "sm80", expects_mma=True) == ("no mma.sync where a dot is meant",)
    assert judge(CLEAN, PTX + "cp.async.cg.shared.global", "sm80", expects_mma=False) == ()


_KERNELS = """
import triton
import triton.language as tl

from ..spec import Variant


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + rows * N + columns), tl.load(b_ptr + rows * N + columns)
    tl.store(out_ptr + rows * N + columns, tl.dot(a, b))


@triton.jit
def _fp8(a_ptr, out_ptr, N: tl.constexpr):
    offset = tl.arange(0, N)
    tl.store(out_ptr + offset, tl.load(a_ptr + offset).to(tl.float8e4nv, bitcast=True).to(tl.float32))


def variants(arch):
    dot = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"}
    aligned = tuple(dot)
    return (
        Variant("dot-64", _dot, dot, {"N": 64}, aligned=aligned, expects_mma=True),
        Variant("dot-256", _dot, dot, {"N": 256}, num_warps=8, aligned=aligned, expects_mma=True),
        Variant("fp8", _fp8, {"a_ptr": "*u8", "out_ptr": "*fp32"}, {"N": 128}),
    )
"""


def _gate(
    case_payload: Path,
    archs: list[str],
    max_smem: int | None = None,
    languages: tuple[str, ...] = ("triton",),
):
    (case_payload / "ops" / "fake" / "triton.py").write_text(_KERNELS)
    request = {
        "task": "compile", "level": "compile", "payload": str(case_payload), "op": "fake", "archs": archs,
        "max_smem": max_smem, "languages": list(languages), "digest": payload.load(case_payload).digest,
    }  # fmt: skip
    job = runner.Job(Path(sys.executable), request)
    return {result.case: result for result in runner.run_cases(job)}


@pytest.mark.kernels
def test_the_gate_passes_what_fits_and_fails_what_does_not(case_payload: Path):
    results = _gate(case_payload, ["sm80", "sm86"], max_smem=16_000)
    assert results["fake[sm80:fp8]"].status is Status.COMPILE_ERROR
    assert "fp8e4nv" in results["fake[sm80:fp8]"].reason
    small = results["fake[sm80:dot-64]"]
    assert small.status is Status.SKIPPED and "more than --max-smem 16,000" in small.reason
    assert small.extra["spill_bytes"] == 0 and small.extra["mma"] and small.extra["registers"] > 0
    large = results["fake[sm86:dot-256]"]
    assert large.status is Status.FAILED and large.reason
    assert results["fake[sm80:small]"].status is Status.PASSED


@pytest.mark.kernels
def test_an_ada_build_may_not_convert_fp8_either(case_payload: Path):
    result = _gate(case_payload, ["sm89"])["fake[sm89:fp8]"]
    assert (result.status, result.reason) == (Status.FAILED, "the code holds an fp8 conversion")


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("shared", "faults", "status"),
    [
        (49_152, (), Status.PASSED),
        (49_153, (), Status.FAILED),
        pytest.param(
            1_000, ("8 B of register spills",), Status.FAILED, id="a-variant-that-fails-keeps-no-promise"
        ),
    ],
)
def test_a_small_variant_is_promised(monkeypatch: pytest.MonkeyPatch, shared, faults, status):
    build = compile_gate.Build(32, shared, 0, 0, 4, 8, mma=False)
    monkeypatch.setattr(compile_gate, "compile_variant", lambda variant, arch: (build, faults))
    events = []
    request = {"op": "gather", "archs": ["sm80"], "max_smem": None, "cases": None, "languages": ["triton"]}
    compile_gate.run(request, events.append)
    assert events[-1]["result"]["case"] == "gather[sm80:small]"
    assert events[-1]["result"]["status"] == status.value


_TILES = """
from functools import partial

from ..spec import TileVariant


def _product(K, stages):
    import tilelang.language as T

    @T.prim_func
    def main(A: T.Tensor((64, K), "bfloat16"), B: T.Tensor((64, K), "bfloat16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(K // 64, num_stages=stages):
                T.copy(A[0, k * 64], a)
                T.copy(B[0, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C)

    return main


def _sum():
    import tilelang.language as T

    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                B[i] = A[i] + 1

    return main


def variants(arch):
    large = ("sm80",)
    found = (
        TileVariant("product", partial(_product, 512, 2), expects_mma=True),
        TileVariant("deep", partial(_product, 1024, 8), large, expects_mma=True),
        TileVariant("no-dot", _sum, expects_mma=True),
        TileVariant("broken", lambda: 1 / 0),
    )
    return tuple(variant for variant in found if arch in variant.archs)
"""


def _tile_gate(case_payload: Path, languages: list[str], **more):
    bundled = payload.bundled().root
    for name in ("tile.py", "gate.py"):
        shutil.copy(bundled / name, case_payload / name)
    (case_payload / "ops" / "fake" / "tilelang.py").write_text(_TILES)
    request = {
        "task": "compile", "level": "compile", "payload": str(case_payload), "op": "fake", "archs": ["sm80", "sm86"],
        "max_smem": None, "languages": languages, "digest": payload.load(case_payload).digest, **more,
    }  # fmt: skip
    return {result.case: result for result in runner.run_cases(runner.Job(Path(sys.executable), request))}


@pytest.mark.kernels
@pytest.mark.skipif(NO_TILELANG != "", reason=NO_TILELANG)
def test_tilelang_variants_are_lowered_and_assembled(case_payload: Path):
    results = _tile_gate(case_payload, ["tilelang"])
    assert set(results) == {
        f"fake[{name}]"
        for name in ("sm80:product", "sm86:product", "sm80:deep", "sm80:no-dot", "sm86:no-dot", "sm80:broken",
                     "sm86:broken", "sm80:small", "sm86:small")
    }  # fmt: skip
    small = results["fake[sm80:product]"]
    assert small.status is Status.PASSED, small.reason
    # two stages of two tiles of 8 KiB, all of it asked for by the launch
    assert small.extra["shared_bytes"] == 2 * 2 * 8192
    assert small.extra["mma"] and small.extra["spill_bytes"] == 0 and small.extra["warps"] == 4
    assert results["fake[sm80:deep]"].extra["shared_bytes"] == 8 * 2 * 8192
    assert results["fake[sm86:no-dot]"].reason == "no mma.sync where a dot is meant"
    broken = results["fake[sm86:broken]"]
    assert (broken.status, broken.reason) == (Status.COMPILE_ERROR, "ZeroDivisionError: division by zero")
    assert results["fake[sm86:small]"].status is Status.PASSED


@pytest.mark.kernels
def test_variants_of_both_languages_have_names_of_their_own(case_payload: Path):
    (case_payload / "ops" / "fake" / "triton.py").write_text(_KERNELS.replace("dot-64", "product"))
    (result,) = _tile_gate(case_payload, ["triton", "tilelang"]).values()
    assert result.status is Status.RUNTIME_ERROR and "variants of equal name" in result.extra["stderr"]


@pytest.mark.parametrize(
    ("shared", "status", "needed"),
    [
        ({True: [50_000, 40_000], False: [100, 60_000]}, Status.PASSED, 40_000),
        pytest.param(
            {True: [50_000], False: [100]}, Status.FAILED, None, id="a-small-helper-excuses-no-large-dot"
        ),
        pytest.param({True: [], False: [100]}, Status.PASSED, 100, id="what-does-not-build-fails-by-itself"),
        pytest.param({True: [], False: []}, Status.FAILED, None, id="nothing-passes"),
        ({False: [100]}, Status.PASSED, 100),
        ({}, Status.FAILED, None),
    ],
)
def test_something_small_is_promised_for_every_kind_of_kernel(shared, status, needed):
    result = compile_gate._promise("fake[sm80:small]", "fake", "sm80", shared, complete=True)
    assert (result.status, result.extra.get("shared_bytes")) == (status, needed)


@pytest.mark.kernels
def test_no_promise_is_broken_where_not_every_variant_could_be_built(monkeypatch: pytest.MonkeyPatch):
    build = compile_gate.Build(32, 60_000, 0, 0, 4, 8, mma=False)
    monkeypatch.setattr(compile_gate, "compile_variant", lambda variant, arch: (build, ()))
    events = []
    request = {"op": "gather", "archs": ["sm80"], "max_smem": None, "cases": None, "languages": ["triton"]}
    compile_gate.run(request | {"complete": False}, events.append)
    assert events[-1]["result"]["status"] == "SKIPPED"


def test_every_served_architecture_has_limits():
    from deepinfer_sm80 import gate

    assert {arch: limits.shared_per_cta for arch, limits in compile_gate.LIMITS.items()} == gate.SMEM_LIMITS
