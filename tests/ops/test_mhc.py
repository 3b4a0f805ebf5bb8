"""The mHC ops: their oracle against exact fractions and stock's own reference, their launches, what they refuse."""

from __future__ import annotations

import importlib
import importlib.util
import random
from fractions import Fraction
from typing import Any

import pytest
from deepinfer_sm80.ops.mhc.coefficients import Mixing

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.kernels

OPS = ("mhc_post", "mhc_post_with_sqrsum", "mhc_pre_delayed", "mhc_fused_post_pre_delayed")
STOCK = "vllm/model_executor/kernels/mhc/torch.py"


class Recorder:
    """Stands for `tile.kernel` and keeps what was launched with what."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, variant: Any) -> Any:
        return lambda *args: self.launches.append((variant.name, args))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    recorder = Recorder()
    monkeypatch.setattr("deepinfer_sm80.tile.kernel", recorder)
    return recorder.launches


def inputs_of(op: str, **params: Any) -> dict[str, Any]:
    from deepinfer_sm80.ops.spec import Case

    workloads = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
    inputs: dict[str, Any] = workloads.make_inputs(Case(op, "made", "smoke", {"tokens": 3, **params}), "cpu")
    return inputs


def call(op: str, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(f"deepinfer_sm80.ops.{op}"), op)(**kwargs)


def float32(value: Fraction) -> float:
    """The nearest float32, ties to even."""
    if value == 0:
        return 0.0
    exponent = abs(value).numerator.bit_length() - value.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(value)
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return float(round(value / step) * step)


def test_the_fused_multiply_add_rounds_once() -> None:
    from deepinfer_sm80.ops.mhc import reference

    source = random.Random(5)
    triples = []
    for _ in range(3000):
        # few bits, so that products lie half way between two float32 values, and addends far below
        a = (source.randrange(-4096, 4096) + 0.5) * 2.0 ** source.randrange(-30, 30)
        b = (source.randrange(128, 256)) * 2.0 ** source.randrange(-10, 10)
        c = source.gauss(0, 1) * 2.0 ** source.randrange(-120, 40)
        triples.append((a, b, c))
    a, b, c = (torch.tensor(values, dtype=torch.float32) for values in zip(*triples, strict=True))
    want = [
        float32(Fraction(x) * Fraction(y) + Fraction(z))
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert reference.fma(a, b, c).tolist() == want


def test_post_is_what_its_formula_says_for_one_element() -> None:
    from deepinfer_sm80.ops.mhc import reference

    x = torch.full((1, 8), 3.0).bfloat16()
    residual = torch.tensor([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1).expand(1, 4, 8).bfloat16()
    comb = torch.arange(16, dtype=torch.float32).reshape(1, 4, 4)
    new = reference.post(x, residual, torch.tensor([[[1.0], [0.5], [0.25], [0.0]]]), comb)
    want = [3 + 0 + 8 + 32 + 96, 1.5 + 1 + 10 + 36 + 104, 0.75 + 2 + 12 + 40 + 112, 3 + 14 + 44 + 120]
    assert new[0, :, 0].tolist() == torch.tensor(want).bfloat16().tolist()


@pytest.mark.release
@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("version", ["0.30.0", "0.33.0"])
def test_the_oracle_agrees_with_stocks_reference(
    pristine_release: Any, version: str, embedding: bool
) -> None:
    from deepinfer_sm80.ops.mhc import reference
    from deepinfer_sm80.ops.mhc.inputs import stock_kwargs

    spec = importlib.util.spec_from_file_location("stock_mhc", pristine_release(version) / STOCK)
    assert spec and spec.loader
    stock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    inputs = inputs_of("mhc_fused_post_pre_delayed", hidden=512, embedding=embedding, pre_eps=0.02, repeat=3)
    pre = ("residual", "fn", "hc_scale", "hc_base", "pre_mix")
    pre = {**{name: inputs[name] for name in pre}, "x": inputs["x"] if embedding else None}
    ours = reference.pre_delayed(**pre, mixing=inputs["mixing"])
    given = stock_kwargs({**pre, "mixing": inputs["mixing"]})
    for got, want in zip(ours, stock.mhc_pre_delayed_torch(**given), strict=True):
        torch.testing.assert_close(
            got.float(), want.float(), rtol=2e-2 if got.dtype == torch.bfloat16 else 0, atol=1e-4
        )
    post = {name: inputs[name] for name in ("x", "residual", "post_layer_mix", "comb_res_mix")}
    torch.testing.assert_close(reference.post(**post), stock.mhc_post_torch(**post), rtol=2e-2, atol=1e-2)


def test_the_residual_mix_is_doubly_stochastic() -> None:
    from deepinfer_sm80.ops.mhc_pre_delayed.reference import mhc_pre_delayed

    comb = mhc_pre_delayed(**inputs_of("mhc_pre_delayed"))[1]
    torch.testing.assert_close(comb.sum(1), torch.ones(3, 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(3, 4), rtol=0, atol=1e-3)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [1, 12, 16, 17, 2048])
def test_a_launch_is_one_of_the_variants(op: str, tokens: int, launches: list[Any]) -> None:
    inputs = {
        name: value
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (2,)
        else _longer(value, tokens)
        for name, value in inputs_of(op, tokens=2, out=False).items()
    }
    call(op, **inputs)
    variants = importlib.import_module(f"deepinfer_sm80.ops.{op}.tilelang").variants("sm80")
    assert {name for name, _ in launches} <= {variant.name for variant in variants}
    assert len(launches) == (1 if "post" in op and "pre" not in op else 2)


def _longer(tensor: Any, tokens: int) -> Any:
    """`tokens` rows that take no memory of their own but look contiguous enough: not written, not read."""
    return tensor[:1].expand(tokens, *tensor.shape[1:]).contiguous()


@pytest.mark.parametrize("op", OPS)
def test_nothing_is_launched_for_no_tokens(op: str, launches: list[Any]) -> None:
    outputs = call(op, **inputs_of(op, tokens=0, out=False))
    assert not launches
    assert {tensor.shape[0] for tensor in (outputs if isinstance(outputs, tuple) else (outputs,))} == {0}


def test_variant_names_are_unique() -> None:
    from deepinfer_sm80.ops.mhc import tilelang as kernels

    for hidden in (5120, 4096):
        made: dict[str, Any] = {}
        for variant in (
            *kernels.pre_variants(kernels.PRE_TABLE, ("residual", "x"), hidden),
            *kernels.pre_variants(kernels.FUSED_TABLE, ("post",), hidden),
            *kernels.post_variants(False, hidden),
            *kernels.post_variants(True, hidden),
        ):
            assert made.setdefault(variant.name, variant.build.args) == variant.build.args


def test_warm_up_compiles_what_any_number_of_tokens_can_meet(
    monkeypatch: pytest.MonkeyPatch, launches: list[Any]
) -> None:
    from deepinfer_sm80.ops.mhc import tilelang as kernels

    warmed: set[str] = set()
    monkeypatch.setattr(
        kernels.tile, "warm_up", lambda variants: warmed.update(variant.name for variant in variants)
    )
    kernels.warm_up(64)
    for tokens in (1, 5, 15, 16, 17, 33, 100, 129, 300, 600, 1100):
        for op in ("mhc_post", "mhc_pre_delayed", "mhc_fused_post_pre_delayed"):
            call(op, **inputs_of(op, tokens=tokens, hidden=64, out=False))
        call("mhc_pre_delayed", **inputs_of("mhc_pre_delayed", tokens=tokens, hidden=64, embedding=True))
    assert {name for name, _ in launches} <= warmed
    warmed.clear()
    kernels.warm_up(kernels.HIDDEN)
    met = set()
    for tokens in range(1, 16385):
        for table, sources in ((kernels.PRE_TABLE, ("residual", "x")), (kernels.FUSED_TABLE, ("post",))):
            row = kernels.row_for(table, tokens, kernels.HIDDEN)
            met.update(kernels.projection_variant(row.projection, source).name for source in sources)
            slices = kernels.HIDDEN // row.projection.slice_columns
            met.add(kernels.finish_variant(row.finish, slices).name)
        post = kernels.post_row_for(tokens, kernels.HIDDEN, False)
        met.add(kernels.post_variant(post.geometry, False).name)
    assert met == warmed


@pytest.mark.parametrize(
    ("op", "change", "error", "message"),
    [
        ("mhc_post", {"x": torch.zeros(3, 5120)}, TypeError, "x must be torch.bfloat16"),
        ("mhc_post", {"x": torch.zeros(2, 5120).bfloat16()}, ValueError, "x must have shape"),
        (
            "mhc_post",
            {"residual": torch.zeros(3, 2, 5120).bfloat16()},
            ValueError,
            "residual must have shape",
        ),
        (
            "mhc_post",
            {"comb_res_mix": torch.zeros(3, 4, 4).mT},
            ValueError,
            "comb_res_mix must be contiguous",
        ),
        ("mhc_pre_delayed", {"fn": torch.zeros(24, 5120)}, ValueError, "fn must have shape"),
        ("mhc_pre_delayed", {"hc_scale": torch.zeros(4)}, ValueError, "hc_scale must have shape"),
        (
            "mhc_pre_delayed",
            {"pre_mix": torch.zeros(3, 4).double()},
            TypeError,
            "pre_mix must be torch.float32",
        ),
        (
            "mhc_pre_delayed",
            {"norm_weight": torch.zeros(5120)},
            TypeError,
            "norm_weight must be torch.bfloat16",
        ),
        ("mhc_pre_delayed", {"mixing": Mixing(0, 0, 0, 2, 0)}, ValueError, "mixing must have 1 iteration"),
        ("mhc_pre_delayed", {"x": torch.zeros(3, 64).bfloat16()}, ValueError, "x must have shape"),
    ],
)
def test_other_arguments_are_refused(op: str, change: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(op, **{**inputs_of(op, out=False), **change})


def test_a_width_that_no_projection_covers_is_refused(launches: list[Any]) -> None:
    with pytest.raises(ValueError, match="hidden must be a multiple of 64, got 72"):
        call("mhc_pre_delayed", **inputs_of("mhc_pre_delayed", hidden=72))


@pytest.mark.parametrize(
    ("hidden", "threads"), [(8, 32), (1000, 128), (5120, 640), (6144, 768), (8192, 1024)]
)
def test_one_cta_sums_a_whole_row(hidden: int, threads: int, launches: list[Any]) -> None:
    call("mhc_post_with_sqrsum", **inputs_of("mhc_post_with_sqrsum", hidden=hidden))
    assert [name for name, _ in launches] == [f"mhc-post-{hidden}-{threads}-sqrsum"]


def test_a_row_that_no_cta_can_sum_is_refused(launches: list[Any]) -> None:
    with pytest.raises(ValueError, match="hidden must be at most 8192 for a sum of squares, got 8200"):
        call("mhc_post_with_sqrsum", **inputs_of("mhc_post_with_sqrsum", hidden=8200))


@pytest.mark.parametrize("op", ["mhc_pre_delayed", "mhc_fused_post_pre_delayed"])
def test_every_border_of_the_table_has_a_seam_case(op: str) -> None:
    from deepinfer_sm80.ops.mhc import tilelang as kernels

    cases = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads").cases()
    table = kernels.PRE_TABLE if op == "mhc_pre_delayed" else kernels.FUSED_TABLE
    tested = {case.params.get("seam") for case in cases}
    raw = {case.params["tokens"] for case in cases if case.params.get("raw")}
    borders = {row.tokens for row in table if row.tokens}
    assert borders <= tested
    if op == "mhc_pre_delayed":
        assert borders | {border + 1 for border in borders} <= raw


def test_a_seam_between_batches_is_found() -> None:
    from deepinfer_sm80.ops.mhc_pre_delayed import reference, workloads
    from deepinfer_sm80.ops.spec import Case

    from deepinfer_cli.validate.compare import compare_outputs

    inputs = workloads.make_inputs(
        Case("mhc_pre_delayed", "made", "smoke", {"tokens": 5, "hidden": 64, "seam": 4}), "cpu"
    )
    want = workloads.expected(Case("mhc_pre_delayed", "made"), inputs)

    def seamed(**kwargs: Any) -> Any:
        post, *others = reference.mhc_pre_delayed(**kwargs)
        return post.add_(1e-3 if len(post) < 5 else 0), *others

    right = workloads.run(inputs, reference.mhc_pre_delayed)
    assert compare_outputs(right, want, workloads.TOLERANCES).ok
    wrong = compare_outputs(workloads.run(inputs, seamed), want, workloads.TOLERANCES)
    assert wrong.reason.startswith("seam")


@pytest.mark.parametrize("embedding", [False, True])
def test_the_raw_case_adds_up_what_the_first_kernel_leaves(
    monkeypatch: pytest.MonkeyPatch, embedding: bool
) -> None:
    from deepinfer_sm80.ops.mhc import tilelang as kernels
    from deepinfer_sm80.ops.mhc_pre_delayed import reference, workloads
    from deepinfer_sm80.ops.spec import Case

    from deepinfer_cli.validate.compare import compare_outputs

    case = Case(
        "mhc_pre_delayed", "made", "smoke", {"tokens": 3, "hidden": 64, "raw": True, "embedding": embedding}
    )
    inputs = workloads.make_inputs(case, "cpu")
    want = workloads.expected(case, inputs)
    monkeypatch.setattr(workloads, "mhc_pre_delayed", reference.mhc_pre_delayed)
    for error, found in ((0.0, ""), (3e-3, "raw_mixes")):
        parts = torch.zeros(2, 3, 26)
        parts[0, :, :24] = want["raw_mixes"] - 1
        parts[1, :, :24] = 1
        parts[1, 1, 5] += error
        parts[1, :, 24] = want["sqrsum"]
        monkeypatch.setattr(kernels, "launch_projection", lambda *_, parts=parts, **__: parts)
        reason = compare_outputs(workloads.run(inputs), want, workloads.TOLERANCES).reason
        assert reason.startswith(found) and bool(reason) == bool(found)
