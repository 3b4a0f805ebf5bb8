from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from deepinfer_sm80.ops.spec import Tolerance  # noqa: E402

from deepinfer_cli.validate.compare import compare, compare_outputs, same_bytes  # noqa: E402

EXACT = Tolerance()
LOOSE = Tolerance(max_abs=0.1, max_rel=0.01)
NAN, INF = math.nan, math.inf


def _compare(got, want, tolerance=EXACT):
    return compare("out", got, want, tolerance)


def test_shape_is_named_before_dtype():
    verdict = _compare(torch.zeros(2, dtype=torch.int32), torch.zeros(3))
    assert verdict.reason == "out: shape is (2,), not (3,)"


def test_dtype_is_named_before_values():
    verdict = _compare(torch.ones(2, dtype=torch.bfloat16), torch.zeros(2))
    assert verdict.reason == "out: dtype is torch.bfloat16, not torch.float32"


@pytest.mark.parametrize(
    ("got", "want", "index"),
    [
        pytest.param([1.0, NAN], [1.0, 2.0], (1,), id="nan-where-finite"),
        pytest.param([1.0, 2.0], [NAN, 2.0], (0,), id="finite-where-nan"),
        pytest.param([INF, 0.0], [-INF, 0.0], (0,), id="infinity-of-the-other-sign"),
        pytest.param([1e30, 0.0], [INF, 0.0], (0,), id="finite-where-infinite"),
        pytest.param([NAN, 0.0], [INF, 0.0], (0,), id="nan-where-infinite"),
    ],
)
@pytest.mark.parametrize("tolerance", [EXACT, Tolerance(1e38, 1e38)])
def test_non_finite_positions_decide_before_any_tolerance(got, want, index, tolerance):
    verdict = _compare(torch.tensor(got), torch.tensor(want), tolerance)
    assert "non-finite values at other positions" in verdict.reason
    assert verdict.first_bad.index == index


def test_bit_exact_tells_minus_zero_from_zero():
    verdict = _compare(torch.tensor([0.0, -0.0]), torch.tensor([0.0, 0.0]))
    assert verdict.reason == "out: 1 of 2 elements not bit-exact"
    assert (verdict.first_bad.got, verdict.first_bad.want) == ("-0.0", "0.0")


def test_bit_exact_accepts_equal_infinities_and_any_nan_payload():
    other_nan = torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    plain = torch.tensor([NAN], dtype=torch.bfloat16)
    assert not same_bytes(other_nan, plain)
    assert _compare(other_nan, plain).ok
    assert _compare(torch.tensor([INF, -INF]), torch.tensor([INF, -INF])).ok


@pytest.mark.parametrize(
    ("got", "ok"),
    [
        pytest.param(100.9, True, id="over-abs-inside-rel"),
        pytest.param(101.1, False, id="over-both"),
    ],
)
def test_an_element_fails_only_over_both_limits(got, ok):
    assert _compare(torch.tensor([got]), torch.tensor([100.0]), LOOSE).ok is ok


def test_inside_abs_is_enough_at_zero():
    assert _compare(torch.tensor([0.099]), torch.tensor([0.0]), LOOSE).ok


def test_one_bad_element_of_a_large_output_is_found():
    want = torch.randn(64, 32)
    got = want.clone()
    got[17, 5] += 3
    verdict = _compare(got, want, LOOSE)
    assert verdict.first_bad.index == (17, 5)
    assert verdict.max_abs == pytest.approx(3, rel=1e-5)
    assert verdict.matched_ratio == pytest.approx(1 - 1 / 2048)


def test_integers_and_empty_outputs():
    assert _compare(torch.tensor([1, -1], dtype=torch.int32), torch.tensor([1, -1], dtype=torch.int32)).ok
    assert not _compare(torch.tensor([1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)).ok
    assert _compare(torch.zeros(0, 4), torch.zeros(0, 4)).ok


def test_a_missing_output_is_a_failure():
    verdict = compare_outputs(
        {"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": EXACT, "b": EXACT}
    )
    assert verdict.reason == "outputs are ['a'], the oracle has ['a', 'b']"
