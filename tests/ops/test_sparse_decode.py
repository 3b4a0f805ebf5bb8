"""The oracle of sparse decode and its workloads, and that the harness sees wrong kernels fail."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

from deepinfer_sm80.ops.sparse_decode import pages, reference, sparse_decode, workloads  # noqa: E402

from deepinfer_cli.validate.compare import compare_outputs, tolerances_of  # noqa: E402
from tests.ops.wrong_sparse_decode import WRONG  # noqa: E402

CASES = {case.name: case for case in workloads.cases("smoke")}
# wrong implementation → cases that must see it, each on its own
SEEN_BY = {
    "off-by-one-row": ("usual", "one-row", "swa-only", "extra-only"),
    "list-starts-late": ("usual", "one-row"),
    "scale-twice": ("usual", "peaked"),
    "record-scale-twice": ("usual", "one-row", "every-scale-alone"),
    "missing-mask": ("holes", "all-invalid", "swa-all-invalid", "extra-all-invalid"),
    "extra-ignored": ("usual", "extra-only", "two-rows"),
    "extra-block-size-of-swa": ("usual", "blocks-of-37-and-1"),
    "missing-sink": ("one-row", "two-rows", "sink-dominated"),
    "sink-in-the-numerator": ("one-row", "two-rows", "sink-dominated"),
    "sink-in-every-split": ("one-row", "two-rows", "sink-dominated"),
    "merged-without-maxima": ("usual", "peaked", "best-row-last"),
    "unrotated": ("rotated", "swa-only-rotated", "one-row-of-extra"),
    "rotated-twice": ("rotated", "padded-cos-sin"),
    "rotated-forward": ("rotated",),
    "nan-not-scrubbed": ("nan", "nan-everywhere", "every-scale-every-code"),
    "writes-a-spare-head": ("tokens-apart",),
}


def judge(name: str, function: Any) -> str:
    """What the comparison says of `function` on a case; empty if it passes."""
    case = CASES[name]
    inputs = workloads.make_inputs(case, "cpu")
    want = workloads.expected(case, inputs)
    return compare_outputs(workloads.run(inputs, function), want, tolerances_of(workloads, case)).reason


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_passes_its_own_cases(name: str) -> None:
    assert judge(name, reference.sparse_decode) == ""


@pytest.mark.parametrize(("wrong", "name"), [(wrong, name) for wrong in WRONG for name in SEEN_BY[wrong]])
def test_wrong_kernels_are_seen(wrong: str, name: str) -> None:
    assert judge(name, WRONG[wrong])


def test_oracle_is_softmax_by_hand() -> None:
    """Two rows and a sink in Python floats, read straight from the bytes."""
    inputs = workloads.make_inputs(CASES["two-rows"], "cpu")
    out, bound = reference.attend(**{name: value for name, value in inputs.items() if name != "out"})
    token, head = 1, 5
    values = [row_by_hand(inputs, name, token) for name in ("swa", "extra")]
    q = inputs["q"][token, head].double().tolist()
    scores = [inputs["scale"] * math.fsum(a * b for a, b in zip(q, row, strict=True)) for row in values]
    total = math.exp(float(inputs["sink"][head])) + sum(map(math.exp, scores))
    for column in (0, 447, 448, 511):
        parts = [math.exp(score) / total * row[column] for score, row in zip(scores, values, strict=True)]
        assert float(out[token, head, column]) == pytest.approx(sum(parts), rel=1e-12)
        assert float(bound[token, head, column]) == pytest.approx(
            abs(sum(parts)) + sum(map(abs, parts)), rel=1e-12
        )


def row_by_hand(inputs: dict[str, Any], name: str, token: int) -> list[float]:
    cache, start = inputs[f"{name}_cache"], inputs[f"{name}_indptr"][token]
    slot, size = int(inputs[f"{name}_indices"][start]), cache.shape[1]
    memory = bytes(cache.untyped_storage())
    page = slot // size * cache.stride(0)
    data = memory[page + slot % size * 576 :][:576]
    scales = memory[page + size * 576 + slot % size * 8 :][:7]
    codes = torch.tensor(list(data[:448]), dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    tail = torch.tensor(list(data[448:]), dtype=torch.uint8).view(torch.bfloat16).double().tolist()
    return [code * 2.0 ** (scales[i // 64] - 127) for i, code in enumerate(codes)] + tail


def test_rotation_undoes_the_one_of_the_keys() -> None:
    """GPT-J pairs: turning by the angle and then back gives the same, and lengths stay."""
    values = torch.randn(3, 2, 512, dtype=torch.float64)
    angle = torch.randn(3, 1, 32, dtype=torch.float64)
    turned = values.clone()
    reference.rotate(turned, angle.cos(), angle.sin())
    pairs = torch.complex(values[..., 448::2], values[..., 449::2]) * torch.polar(
        torch.ones_like(angle), angle
    )
    torch.testing.assert_close(turned[..., 448::2], pairs.real)
    torch.testing.assert_close(turned[..., 449::2], pairs.imag)
    assert torch.equal(turned[..., :448], values[..., :448])
    reference.rotate(turned, angle.cos(), -angle.sin())
    torch.testing.assert_close(turned, values)


def test_the_bound_survives_rotation() -> None:
    """Errors of a pair's elements, each as large as its own bound allows, stay below the rotated bound."""
    case = CASES["rotated"]
    inputs = workloads.make_inputs(case, "cpu")
    plain = {name: value for name, value in inputs.items() if name not in ("out", "positions")}
    out, bound = reference.attend(**plain)
    rotated, rotated_bound = reference.attend(**plain, positions=inputs["positions"])
    error = (bound - out.abs()) * torch.randn(out.shape, dtype=torch.float64).sign()
    table = inputs["cos_sin_cache"][inputs["positions"]].double()[:, None]
    disturbed = out + error
    reference.rotate(disturbed, table[..., :32], -table[..., 32:])
    room = rotated_bound - rotated.abs() - (disturbed - rotated).abs()
    assert float(room.min()) > -1e-12
    # and it is no looser than a pair can need
    assert float(room[..., 448:].min()) < 1e-9


def test_writer_quantises_as_vllm_does() -> None:
    values = torch.randn(50, 512, generator=torch.Generator().manual_seed(5)) * 3
    codes, scales, tails = pages.quantise(values)
    exact = (
        codes.view(50, 7, 64).view(torch.float8_e4m3fn).double()
        * torch.exp2(scales.double() - 127)[..., None]
    )
    assert float((exact.view(50, 448) - values[:, :448]).abs().max()) < 3 * 5 * 2.0**-4
    assert torch.equal(tails, values[:, 448:].bfloat16())
    largest = codes.view(50, 7, 64).view(torch.float8_e4m3fn).float().abs().amax(2)
    assert bool(((largest > 220) & (largest <= 448)).all())


def test_every_scale_and_code_is_met() -> None:
    inputs = workloads.make_inputs(CASES["every-scale-every-code"], "cpu")
    cache, slots = inputs["extra_cache"], inputs["extra_indices"][: inputs["extra_indptr"][1]].long()
    page, row = slots // cache.shape[1], slots % cache.shape[1]
    size = cache.shape[1]
    scales = cache.as_strided((cache.shape[0], size, 8), (cache.stride(0), 8, 1), size * 576)
    assert len(scales[page, row, :7].unique()) > 180
    data = cache.as_strided((cache.shape[0], size, 576), (cache.stride(0), 576, 1))
    assert len(data[page, row, :448].unique()) == 256


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(2, 16, 512)}, TypeError, "q must be torch.bfloat16"),
        ({"out": torch.zeros(2, 15, 512).bfloat16()}, ValueError, "out must have shape"),
        (
            {name: torch.zeros(1, 16, 512).bfloat16().expand(65_536, -1, -1) for name in ("q", "out")},
            ValueError,
            "at most 65535 tokens",
        ),
        ({"extra_indptr": None}, ValueError, "belong together"),
        ({"swa_cache": torch.zeros(3, 32, 528, dtype=torch.uint8)}, ValueError, "swa_cache must have shape"),
        ({"sink": torch.zeros(15)}, ValueError, "sink must have 16 entries"),
        ({"cos_sin_cache": None}, ValueError, "positions need"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, TypeError, "positions must be"),
        ({"extra_indices": torch.zeros(5)}, TypeError, "extra_indices must be"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = workloads.make_inputs(CASES["rotated"], "cpu")
    with pytest.raises(error, match=message):
        sparse_decode(**inputs | changes)


def test_every_parameter_of_a_case_is_used() -> None:
    """A parameter that nobody reads is a case that does not test what its name says."""
    read: set[str] = set()

    class Read(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: str) -> Any:
            read.add(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

    defaults = workloads._with_defaults
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "_with_defaults", lambda params: Read(defaults(params)))
        for case in workloads.cases("full"):
            read.clear()
            small = {
                name: min(value, 9)
                for name, value in case.params.items()
                if name in ("tokens", "gap", "swa_gap")
            }
            if case.params["tokens"] <= 24:
                workloads.make_inputs(dataclasses.replace(case, params={**case.params, **small}), "meta")
                assert read >= set(case.params) - {"max_abs"}, case.id
