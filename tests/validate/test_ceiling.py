"""The yardstick for tensor cores: right, in Ampere's instructions, and never more than the architecture allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.kernels
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from deepinfer_sm80.ops.spec import Variant  # noqa: E402

from deepinfer_cli.validate import ceiling, compile_gate, product  # noqa: E402

_POINTERS = ("a_ptr", "b_ptr", "c_ptr")


@pytest.mark.parametrize("tile", ceiling._TILES, ids=str)
def test_a_tile_is_mma_sync_without_spills(tile):
    rows, columns, depth, warps, stages = tile
    variant = Variant(
        "product", product._product_kernel, dict.fromkeys(_POINTERS, "*bf16"),
        {"N": 8192, "K": 8192, "ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "GROUP": product._GROUP},
        num_warps=warps, num_stages=stages, aligned=_POINTERS, expects_mma=True,
    )  # fmt: skip
    build, faults = compile_gate.compile_variant(variant, "sm80")
    assert faults == () and build.mma


_MULTIPLY = """
import json
import torch
from deepinfer_cli.validate import interpreter, product

interpreter.install()
a, b = torch.randn(256, 64).bfloat16(), torch.randn(64, 512).bfloat16()
c = torch.empty(256, 512).bfloat16()
product._product_kernel[(8 * 8,)](a, b, c, 512, 64, 32, 64, 16, 4)
print(json.dumps(float((c.float() - a.float() @ b.float()).abs().max())))
"""


def test_the_product_is_right(tmp_path: Path):
    script = tmp_path / "multiply.py"
    script.write_text(_MULTIPLY)
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    # half of the last bit of values below 64
    assert json.loads(done.stdout) <= 0.125, done.stderr[-2000:]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """Small products on the CPU: a tile's first number says how many TFLOP/s it does, its second its shared memory."""
    plain = torch.randn
    monkeypatch.setattr(ceiling, "_SIZE", 512)
    seeded = SimpleNamespace(manual_seed=lambda seed: None)
    monkeypatch.setattr(torch, "Generator", lambda device: seeded)
    monkeypatch.setattr(
        torch, "randn", lambda shape, generator, device, dtype: plain(shape).to(dtype).contiguous()
    )

    def multiply(a, b, c, tile):
        if tile[0] < 0:
            raise RuntimeError("no such tile")
        c.copy_(a.float() @ b.float() * tile[2])
        return tile[1]

    monkeypatch.setattr(product, "multiply", multiply)
    monkeypatch.setattr(ceiling, "_rate", lambda call: call.args[3][0] * 1e12)


def test_the_ceiling_is_the_best_tile_that_fits_and_is_right(on_the_cpu, monkeypatch: pytest.MonkeyPatch):
    tiles = [(300, 90_000, 1), (400, 150_000, 1), (500, 90_000, 2), (-1, 0, 1), (200, 1000, 1)]
    monkeypatch.setattr(ceiling, "_TILES", tiles)
    assert ceiling.mma_rate("sm80", nullcontext) == 400e12
    assert ceiling.mma_rate("sm86", nullcontext) == 300e12
    monkeypatch.setattr(ceiling, "_TILES", tiles[2:4])
    with pytest.raises(RuntimeError, match=r"\(500, 90000, 2\) is wrong by 1.*no such tile"):
        ceiling.mma_rate("sm80", nullcontext)


def test_mma_is_only_measured_where_an_op_multiplies(monkeypatch: pytest.MonkeyPatch):
    from deepinfer_cli.validate import bench_worker

    monkeypatch.setattr(bench_worker.timing, "copy_bandwidth", lambda: 2e12)
    monkeypatch.setattr(bench_worker, "mma_rate", lambda arch, compiling: 4e14)
    codegen = SimpleNamespace(forced=None)
    assert bench_worker.measure_roofs(codegen, "sm80", False) == ceiling.Roofs(2e12)
    assert bench_worker.measure_roofs(codegen, "sm80", True) == ceiling.Roofs(2e12, 4e14)
