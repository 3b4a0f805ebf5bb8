"""What the indexer ops refuse, which variant they take, and how they share out the work."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels


def inputs(op: str, **changes: Any) -> dict[str, Any]:
    workloads = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
    case = next(case for case in workloads.cases() if case.name == "usual")
    return {**workloads.make_inputs(case, "cpu"), **changes}


def codes(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.uint8)


PREFILL = {
    "64 heads": ({"q": codes(11, 64, 128)}, ValueError, r"32 heads of 128 codes, has \(11, 64, 128\)"),
    "bf16 queries": (
        {"q": codes(11, 32, 128).bfloat16()},
        TypeError,
        "q must be torch.float8_e4m3fn or torch.uint8",
    ),
    "an odd address": (
        {"q": codes(11 * 4096 + 1)[1:].view(11, 32, 128)},
        ValueError,
        "multiples of 16 bytes",
    ),
    "an odd stride": ({"k": codes(75, 132)[:, :128]}, ValueError, "k must have a contiguous last dim"),
    "narrow keys": ({"k": codes(75, 64)}, ValueError, r"k must have shape \(keys, 128\)"),
    "bf16 weights": ({"weights": torch.zeros(11, 32).bfloat16()}, TypeError, "weights must be torch.float32"),
    "few weights": ({"weights": torch.zeros(10, 32)}, ValueError, "weights must have shape"),
    "few scales": ({"k_scale": torch.zeros(74)}, ValueError, "k_scale must have shape"),
    "int64 bounds": ({"ks": torch.zeros(11, dtype=torch.int64)}, TypeError, "ks must be torch.int32"),
    "few bounds": ({"ke": torch.zeros(10, dtype=torch.int32)}, ValueError, "ke must have shape"),
    "few rows": ({"out": torch.zeros(10, 75)}, ValueError, "out must have shape"),
}
DECODE = {
    "no token dim": ({"q": codes(2, 32, 128)}, ValueError, "q must have 4 dims"),
    "few weights": ({"weights": torch.zeros(1, 32)}, ValueError, "weights must have shape"),
    "wide records": ({"kv_cache": codes(9, 64, 584)}, ValueError, "kv_cache must have shape"),
    "records apart": ({"kv_cache": codes(9, 64, 144)[:, :, :132]}, ValueError, "kv_cache must have contiguous pages"),
    "an odd page stride": ({"kv_cache": codes(9, 63, 132)}, ValueError, "kv_cache must have contiguous pages"),
    "int64 lengths": ({"context_lens": torch.zeros(2, 1, dtype=torch.int64)}, TypeError, "context_lens must be"),
    "three lengths": ({"context_lens": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, "context_lens must have"),
    "few lengths": ({"context_lens": torch.zeros(1, dtype=torch.int32)}, ValueError, "context_lens must have"),
    "few tables": ({"block_table": torch.zeros(1, 9, dtype=torch.int32)}, ValueError, "block_table must have"),
    "few rows": ({"out": torch.zeros(1, 75)}, ValueError, "out must have shape"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "name"),
    [("indexer_prefill", one) for one in PREFILL] + [("indexer_decode", one) for one in DECODE],
)
def test_refuses(op: str, name: str) -> None:
    changes, error, message = (PREFILL if op == "indexer_prefill" else DECODE)[name]
    with pytest.raises(error, match=message):
        getattr(importlib.import_module(f"deepinfer_sm80.ops.{op}"), op)(**inputs(op, **changes))


@pytest.mark.parametrize("op", ["indexer_prefill", "indexer_decode"])
def test_keys_are_decoded_once_for_all_warps(op: str) -> None:
    """Left to itself, Triton moves the decoding behind shared memory, where every warp does it again."""
    from deepinfer_cli.validate import artifact

    kernel = importlib.import_module(f"deepinfer_sm80.ops.{op}.triton")
    for variant in kernel.variants("sm80"):
        ptx = artifact.compile_triton(variant, "sm80").asm["ptx"]
        # in the loop and before it: q and k, 128 codes a row, over the threads, two to a conversion
        rows = 32 * variant.constexprs["TOKENS"] + variant.constexprs["KEYS"]
        conversions = rows * 128 // (32 * variant.num_warps) // 2
        count = ptx.count("cvt.rn.bf16x2.f32") or ptx.count("cvt.rn.bf16.f32") // 2
        assert count <= conversions, (variant.name, count, conversions)


def test_the_small_prefill_variant_in_the_interpreter() -> None:
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("child.py")), "indexer_prefill"],
        env={**os.environ, "TRITON_INTERPRET": "1", "DEEPINFER_FORCE_ARCH": "sm86"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = child.stdout.splitlines()
    assert child.returncode == 0, child.stderr[-2000:]
    assert len(lines) >= 27 and all(", true, " in line for line in lines)
