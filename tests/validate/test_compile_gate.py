from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepinfer_cli.overlay import payload
from deepinfer_cli.validate import compile_gate, runner
from deepinfer_cli.validate.compile_gate import LIMITS, Build, ctas_per_sm, judge, parse_ptxas
from deepinfer_cli.validate.model import Status

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
        "ptxas info    : Used 255 registers, used 1 barriers, 392 bytes cmem[0]\n"
    )
    assert parse_ptxas(log) == (255, 64, 16)


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


def _gate(case_payload: Path, archs: list[str], max_smem: int | None = None):
    (case_payload / "ops" / "fake" / "triton.py").write_text(_KERNELS)
    request = {
        "task": "compile", "level": "compile", "payload": str(case_payload), "op": "fake", "archs": archs,
        "max_smem": max_smem, "digest": payload.load(case_payload).digest,
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
    compile_gate.run({"op": "gather", "archs": ["sm80"], "max_smem": None, "cases": None}, events.append)
    assert events[-1]["result"]["case"] == "gather[sm80:small]"
    assert events[-1]["result"]["status"] == status.value


def test_every_served_architecture_has_limits():
    from deepinfer_sm80 import gate

    assert {arch: limits.shared_per_cta for arch, limits in compile_gate.LIMITS.items()} == gate.SMEM_LIMITS
