"""The three e4m3 writers: their oracles against stock's kernels, what they refuse, and which variant they take."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ops import stock_source

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

CHILD = Path(__file__).with_name("stock_writers_child.py")
BF16 = torch.bfloat16
# op → checks at least, stock's file, and what to cut out of it
STOCK = {
    "kv_insert": (
        19,
        "models/deepseek_v41/common/ops/fused_compress_quant_cache.py",
        ("_rope_quant_insert_kernel",),
    ),
    "indexer_k": (
        22,
        "models/deepseek_v41/common/ops/indexer_k_store.py",
        ("_indexer_k_norm_rope_quant_store_kernel",),
    ),
    "indexer_q": (
        15,
        "models/deepseek_v4/common/ops/fused_indexer_q.py",
        ("_get_cos_sin", "FusedIndexerQRopeQuantTritonKernel.kernel"),
    ),
}
# branches that SM8x never takes call these
HEAD = """import triton
import triton.language as tl
@triton.jit
def _fp32x2_to_fp4x2(x_lo, x_hi):
    return x_lo.to(tl.uint8)
@triton.jit
def pack_ue8m0_x4(scale):
    return scale.to(tl.int32)
"""


def inputs(op: str, name: str, **changes: Any) -> dict[str, Any]:
    """Inputs of the smoke case `name`; what is changed is a parameter of the case or an argument of the op."""
    workloads = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
    case = next(case for case in workloads.cases() if case.name == name)
    made = workloads.make_inputs(case, "cpu")
    return {**made, **changes}


def call(op: str, **arguments: Any) -> Any:
    return getattr(importlib.import_module(f"deepinfer_sm80.ops.{op}"), op)(**arguments)


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0", "0.33.0"])
@pytest.mark.parametrize("op", list(STOCK))
def test_the_oracles_give_stocks_bytes(pristine_release, once, tmp_path, op, version):
    """Its kernels, from the release's own files, in Triton's interpreter; what releases have in common runs once."""
    fewest, file, names = STOCK[op]
    source = "\n\n".join([HEAD, *stock_source.kernels(pristine_release(version) / "vllm" / file, names)])

    def run():
        (tmp_path / "stock_writers.py").write_text(source, encoding="utf-8")
        child = subprocess.run(
            [sys.executable, str(CHILD), op, str(tmp_path)],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert child.returncode == 0, child.stderr[-3000:]
        return child.stdout

    checks = [json.loads(line) for line in once(f"stock writers {op}\n{source}", run).splitlines()]
    assert len(checks) >= fewest
    for name, count, different, largest in checks:
        # where its code has one fused step the interpreter has two; where the norm's sum has another order, an ulp
        assert different <= count // 10_000 and largest <= (1 if different else 0), name


def test_fused_is_one_rounding():
    from fractions import Fraction

    from deepinfer_sm80.ops.rope_quant.reference import fused

    generator = torch.Generator().manual_seed(5)
    a, b, c = (torch.randn(500, generator=generator) for _ in range(3))
    c[:200] = -(a[:200] * b[:200]) * (1 + 2.0**-20 * torch.randn(200, generator=generator))
    # the middle of two floats, less or more than a float64 beside 1 can show
    a[200:203], b[200:203], c[200:203] = 2.0**-12, 2.0**-12, torch.tensor([1.0, 1 + 2.0**-23, 1.0])
    a[202], b[202] = 2.0**-12 * (1 + 2.0**-23), 2.0**-12
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    for got, want in zip(fused(a, b, c).tolist(), exact, strict=True):
        step = Fraction(float(torch.tensor(got).nextafter(torch.tensor(float("inf")))) - got)
        assert abs(Fraction(got) - want) <= step / 2 + abs(want) * Fraction(1, 1 << 40)


def test_scales_of_the_oracle_are_the_least_powers_that_hold_the_group():
    from deepinfer_sm80.ops.rope_quant.inputs import bf16_rows
    from deepinfer_sm80.ops.rope_quant.reference import scale_exponents

    rows = bf16_rows((400, 64), "edges", torch.Generator().manual_seed(9))
    amax = rows.double().abs().amax(dim=1).clamp(min=1e-4)
    scale = torch.pow(2.0, scale_exponents(rows).double())
    assert bool((amax <= 448 * scale).all()) and bool((amax > 224 * scale).all())
    assert bool((amax == 448 * scale).any())


@pytest.mark.parametrize("kind", ["random", "edges", "modest"])
def test_codes_of_the_oracle_are_those_of_pytorch(kind):
    from deepinfer_sm80.ops.rope_quant import reference as parts
    from deepinfer_sm80.ops.rope_quant.inputs import bf16_rows

    rows = bf16_rows((400, 64), kind, torch.Generator().manual_seed(11))
    exponents = parts.scale_exponents(rows)
    # a quotient of bf16 and a power of two is exact in float64, and PyTorch rounds float64 through float32
    quotient = (rows.double() / torch.pow(2.0, exponents.double())[:, None]).float()
    want = quotient.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(parts.encode(rows, exponents), want)


KV = "pages-of-other-layers-between"
REFUSED = [
    ("kv_insert", {"latent": torch.zeros(30, 512)}, TypeError, "latent must be torch.bfloat16"),
    ("kv_insert", {"latent": torch.zeros(30, 256, dtype=BF16)}, ValueError, r"latent must have shape"),
    ("kv_insert", {"latent": torch.zeros(29, 512, dtype=BF16)}, ValueError, r"latent must have shape"),
    ("kv_insert", {"latent": torch.zeros(30, 520, dtype=BF16)[:, :512]}, ValueError, "latent must be contiguous"),
    ("kv_insert", {"kv_cache": torch.zeros(3, 64, 528, dtype=torch.uint8)}, ValueError, r"584.*\(3, 64, 528\)"),
    ("kv_insert", {"kv_cache": torch.zeros(3, 64, 584, dtype=BF16)}, TypeError, "kv_cache must be torch.uint8"),
    (
        "kv_insert",
        {"kv_cache": torch.zeros(3 * 37377, dtype=torch.uint8).as_strided((3, 64, 584), (37377, 584, 1))},
        ValueError,
        "multiples of 2 bytes",
    ),
    ("kv_insert", {"positions": torch.zeros(30, dtype=torch.int32)}, TypeError, "positions must be torch.int64"),
    ("kv_insert", {"positions": torch.zeros(29, dtype=torch.int64)}, ValueError, "positions must have shape"),
    ("kv_insert", {"slot_mapping": torch.zeros(30, dtype=torch.int32)}, TypeError, "slot_mapping must be torch.int64"),
    ("kv_insert", {"cos_sin_cache": torch.zeros(99, 64, dtype=BF16)}, TypeError, "cos_sin_cache must be torch.float32"),
    ("kv_insert", {"cos_sin_cache": torch.zeros(99, 128)}, ValueError, "cos_sin_cache must have shape"),
    ("kv_insert", {"compress_ratio": 0}, ValueError, "compress_ratio must be positive, is 0"),
    ("indexer_k", {"k_pre": torch.zeros(30, 64, dtype=BF16)}, ValueError, "k_pre must have shape"),
    ("indexer_k", {"k_pre": torch.zeros(30, 256, dtype=BF16)[:, ::2]}, ValueError, "contiguous"),
    ("indexer_k", {"norm_weight": torch.ones(128)}, TypeError, "norm_weight must be torch.bfloat16"),
    ("indexer_k", {"norm_eps": 0.0}, ValueError, r"at least 2\^-126, is 0.0"),
    ("indexer_k", {"k_cache": torch.zeros(3, 64, 68, dtype=torch.uint8)}, ValueError, r"132.*\(3, 64, 68\)"),
    (
        "indexer_k",
        {"k_cache": torch.zeros(3 * 8450, dtype=torch.uint8).as_strided((3, 64, 132), (8450, 132, 1))},
        ValueError,
        "multiples of 4 bytes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused(op, changes, error, message):
    with pytest.raises(error, match=message):
        call(op, **inputs(op, KV, **changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(7, 32, 64, dtype=BF16)}, ValueError, "q must have shape"),
        ({"q": torch.zeros(7, 32, 128, dtype=torch.float16)}, TypeError, "q must be torch.bfloat16"),
        ({"q": torch.zeros(8, 32, 128, dtype=BF16)}, ValueError, "7 positions, but 8 queries"),
        ({"weights": torch.zeros(7, 31, dtype=BF16)}, ValueError, "weights must have shape"),
        ({"weights": torch.zeros(7, 32)}, TypeError, "weights must be torch.bfloat16"),
        ({"positions": torch.zeros(7, dtype=torch.int32)}, TypeError, "positions must be torch.int64"),
    ],
)
def test_queries_that_do_not_fit_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        call("indexer_q", **inputs("indexer_q", "seven-tokens", **changes))


@pytest.mark.parametrize(
    ("op", "name", "variant"),
    [
        ("kv_insert", "ratio-1", "wide"),
        ("kv_insert", "pages-of-other-layers-between", "wide"),
        ("kv_insert", "page-stride-2-more", "narrow"),
        ("kv_insert", "cache-shifted-by-2", "narrow"),
        ("kv_insert", "latent-shifted", "narrow"),
        ("indexer_k", "ratio-1", "wide"),
        ("indexer_k", "keys-apart", "wide"),
        ("indexer_k", "keys-apart-by-an-odd-number", "narrow"),
        ("indexer_k", "keys-shifted", "narrow"),
        ("indexer_k", "page-stride-4-more", "narrow"),
        ("indexer_k", "cache-shifted-by-4", "narrow"),
    ],
)
def test_the_wide_variant_is_taken_only_where_its_alignment_holds(op, name, variant):
    kernel = importlib.import_module(f"deepinfer_sm80.ops.{op}.triton")
    made = inputs(op, name)
    rows, cache = ("latent", "kv_cache") if op == "kv_insert" else ("k_pre", "k_cache")
    assert kernel.pick(made[rows], made[cache]).name == variant


@pytest.mark.parametrize(
    ("name", "variant"),
    [("seven-tokens", "wide"), ("tokens-apart", "wide"), ("tokens-apart-by-a-word", "narrow")],
)
def test_queries_are_read_in_wide_words_only_where_they_can_be(name, variant):
    from deepinfer_sm80.ops.indexer_q import triton as kernel

    assert kernel.pick(inputs("indexer_q", name)["q"]).name == variant


@pytest.mark.parametrize("name", ["queries-shifted", "tokens-apart-by-an-odd-number"])
def test_queries_at_odd_addresses_are_copied(name, monkeypatch):
    from deepinfer_sm80.ops.indexer_q import triton as kernel

    launched: list[Any] = []
    monkeypatch.setattr(kernel, "launch", lambda *args: launched.append(args))
    made = inputs("indexer_q", name)
    codes, weights = call("indexer_q", **made)
    q = launched[0][1]
    assert q is not made["q"] and q.is_contiguous() and torch.equal(q, made["q"])
    assert (codes.dtype, weights.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert codes.shape == made["q"].shape and weights.shape == made["weights"].shape


def test_every_parameter_of_a_case_is_used():
    """A parameter that nobody reads is a case that does not test what its name says."""

    class Read(dict):  # type: ignore[type-arg]
        def __init__(self, values: Any) -> None:
            super().__init__(values)
            self.read: set[str] = set()

        def __getitem__(self, key: str) -> Any:
            self.read.add(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            self.read.add(key)
            return super().get(key, default)

    for op in ("kv_insert", "indexer_k", "indexer_q"):
        workloads = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
        for case in workloads.cases("full"):
            if case.params["tokens"] > 500:
                continue
            params = Read(case.params)
            workloads.make_inputs(replace(case, params=params), "meta")
            assert params.read >= set(case.params), case.id
