"""The oracles themselves: against PyTorch's own formats, exact fractions, and stock's functions of real releases."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels


def test_e4m3_values_are_those_of_pytorch() -> None:
    from deepinfer_sm80.numerics import e4m3

    codes = torch.arange(256, dtype=torch.uint8)
    ours = torch.tensor(e4m3.reference_values(), dtype=torch.float64)
    theirs = codes.view(torch.float8_e4m3fn).double()
    assert torch.equal(ours.isnan(), theirs.isnan())
    kept = ~ours.isnan()
    assert torch.equal(ours[kept], theirs[kept])
    assert torch.equal(ours[kept].signbit(), theirs[kept].signbit())


def test_e4m3_encode_is_that_of_pytorch_below_saturation() -> None:
    from deepinfer_sm80.numerics import e4m3

    values = torch.randn(3000, generator=torch.Generator().manual_seed(7)) * torch.logspace(-4, 2.2, 3000)
    ours = torch.tensor([e4m3.reference_encode(value) for value in values.tolist()], dtype=torch.uint8)
    assert torch.equal(ours, values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(("value", "code"), [(464.0, 0x7E), (1e9, 0x7E), (-math.inf, 0xFE), (-0.0, 0x80)])
def test_e4m3_encode_saturates(value: float, code: int) -> None:
    from deepinfer_sm80.numerics import e4m3

    assert e4m3.reference_encode(value) == code


def test_rounding_to_bf16_is_one_rounding() -> None:
    from deepinfer_sm80.ops.gather.reference import round_to_bf16

    generator = torch.Generator().manual_seed(3)
    mantissas = 1 + torch.rand(2000, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-140, 128, (2000,), generator=generator)
    values = [math.ldexp(m, e) for m, e in zip(mantissas.tolist(), exponents.tolist(), strict=True)]
    # just above the middle of two bf16 values, by less than float32 can show
    values += [1 + 2.0**-8 + 2.0**-40, 2.0**-134 + 2.0**-180, 2.0**-134]
    got = round_to_bf16(torch.tensor(values, dtype=torch.float64)).double().tolist()
    assert got == [nearest_bf16(value) for value in values]


def nearest_bf16(value: float) -> float:
    step = Fraction(2) ** max(math.frexp(value)[1] - 8, -133)
    rounded = round(Fraction(value) / step) * step
    return math.inf if rounded >= Fraction(2) ** 128 else float(rounded)


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0"])
def test_combine_equals_stock_torch_function(pristine_release: Callable[[str], Path], version: str) -> None:
    from deepinfer_sm80.ops.combine import workloads

    stock = function_of(
        pristine_release(version) / "vllm/models/deepseek_v41/amd/rocm.py", "combine_topk_swa_indices"
    )
    seen = 0
    for case in workloads.cases("full"):
        inputs = workloads.make_inputs(case, "cpu")
        # its division by a ratio of 0 raises on a CPU; it has no tokens of no request
        if inputs["width_cap"] and inputs["compress_ratio"] and not case.gpu_only:
            got = workloads.run(workloads.call_kwargs(inputs, "torch"), stock)
            for name, want in workloads.expected(case, inputs).items():
                assert torch.equal(got[name], want), (case.id, name)
            seen += 1
    assert seen >= 4


@pytest.mark.release
@pytest.mark.parametrize(
    ("version", "fewest"), [("0.30.0", 2), ("0.31.0", 15), ("0.32.0", 16), ("0.33.0", 16)]
)
def test_oracles_equal_stock_kernels(
    pristine_release: Callable[[str], Path], tmp_path: Path, version: str, fewest: int
) -> None:
    source = pristine_release(version) / "vllm/models/deepseek_v41/common/ops/cache_utils.py"
    child = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("stock_child.py")),
            str(source),
            str(tmp_path),
            version,
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    checks = [json.loads(line) for line in child.stdout.splitlines()]
    assert [check for check in checks if not check[1]] == []
    assert len(checks) >= fewest


def function_of(path: Path, name: str) -> Callable[..., Any]:
    """One function of a module, with the module's integer constants, without importing the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    namespace: dict[str, Any] = {"torch": torch}
    module = ast.Module(body=[*constants, function], type_ignores=[])
    exec(compile(module, str(path), "exec"), namespace)
    return namespace[name]
