from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")


from deepinfer_sm80.ops.spec import Case, SparseTolerance, Tolerance, UlpTolerance  # noqa: E402

from deepinfer_cli.validate.compare import (  # noqa: E402
    compare,
    compare_outputs,
    same_bytes,
    tolerances_of,
)

EXACT = Tolerance()
LOOSE = Tolerance(max_abs=0.1, max_rel=0.01)
NAN, INF = math.nan, math.inf


def _compare(got, want, tolerance=EXACT):
    return compare("out", got, want, tolerance)


def _double(*values: float):
    return torch.tensor(values, dtype=torch.float64)


def _bf16(*codes: int):
    return torch.tensor([code - (code >> 15 << 16) for code in codes], dtype=torch.int16).view(torch.bfloat16)


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


# sparse attention

SPARSE = SparseTolerance()


def _sparse(got, want, bound, tolerance=SPARSE):
    return compare("out", got, want, tolerance, bound)


def test_the_sparse_limit_grows_with_the_bound_of_each_element():
    want, bound = _double(1.0, 0.0), _double(1.0, 8.0)
    assert _sparse(torch.tensor([1.0, 0.03125]).bfloat16(), want, bound, SparseTolerance(cosine=1)).ok
    verdict = _sparse(torch.tensor([1.0, 0.033]).bfloat16(), want, bound, SparseTolerance(cosine=1))
    assert verdict.reason == "out: 1 of 2 elements outside the sparse-attention bound"
    assert verdict.first_bad.index == (1,)
    # relative to what was summed, not to a value that cancelled to nothing
    assert verdict.max_rel == pytest.approx(0.033 / 8, rel=0.01)


@pytest.mark.parametrize(("steps", "ok"), [(0, True), (1, False)])
def test_an_element_off_by_exactly_the_limit_passes(steps, ok):
    tolerance = SparseTolerance(factor=2.0**-8, floor=0.0, cosine=1)
    got = torch.tensor([1.0]).bfloat16()
    want = _double(1.0 - 2.0**-8 - steps * 2.0**-52)
    assert _sparse(got, want, _double(1.0), tolerance).ok is ok


@pytest.mark.parametrize(("got", "ok"), [(0.0, True), (9e-7, True), (2e-6, False)])
def test_a_bound_of_zero_leaves_the_floor(got, ok):
    assert _sparse(torch.tensor([got]).bfloat16(), _double(0.0), _double(0.0)).ok is ok


def test_what_must_not_be_written_is_exact_and_no_part_of_the_cosine():
    want, bound = _double(-24576.0, 0.5), _double(0.0, 0.5)
    assert _sparse(torch.tensor([-24576.0, 0.5]).bfloat16(), want, bound).ok
    assert not _sparse(torch.tensor([-24448.0, 0.5]).bfloat16(), want, bound).ok
    # a sentinel would hide that all else is wrong
    loose = SparseTolerance(factor=2.0)
    verdict = _sparse(torch.tensor([-24576.0, -0.5]).bfloat16(), want, bound, loose)
    assert verdict.reason == "out: cosine difference 2, more than 1e-05"
    assert verdict.figures["cosine_difference"] == 2.0


def test_a_common_scale_shows_in_the_cosine_difference():
    want = torch.randn(4096, dtype=torch.float64)
    verdict = _sparse((want * 1.01).bfloat16(), want, want.abs() * 16)
    assert "cosine difference" in verdict.reason
    assert verdict.max_abs > 0.01


def test_all_zeros_have_no_cosine_difference():
    verdict = _sparse(torch.zeros(4).bfloat16(), torch.zeros(4).double(), torch.zeros(4).double())
    assert verdict.ok
    assert verdict.figures == {"cosine_difference": 0.0, "share_of_limit": 0.0}


def test_nan_is_compared_by_position_and_a_nan_bound_allows_nothing():
    one = torch.tensor([1.0, NAN]).bfloat16()
    assert _sparse(one, _double(1.0, NAN), _double(1.0, NAN)).ok
    assert "non-finite" in _sparse(one, _double(1.0, 2.0), _double(1.0, 2.0)).reason
    assert "non-finite" in _sparse(one.nan_to_num(0.0), _double(1.0, NAN), _double(1.0, NAN)).reason
    assert not _sparse(one[:1], _double(1.5), _double(NAN)).ok


def test_the_sparse_output_is_bf16_and_its_oracle_is_not_rounded():
    assert "dtype is torch.float64, not torch.bfloat16" in _sparse(*[_double(1.0)] * 3).reason
    verdict = _sparse(torch.ones(1).bfloat16(), _double(1.0), None)
    assert verdict.reason == "out: the oracle gave no out:bound of its shape"
    want = _double(1.0 + 2.0**-8)
    assert _sparse(torch.ones(1).bfloat16(), want, want).max_abs == 2.0**-8


def test_a_case_may_ask_for_an_absolute_limit_too():
    workloads = SimpleNamespace(TOLERANCES={"out": SPARSE, "lens": EXACT, "x": UlpTolerance()})
    tolerances = tolerances_of(workloads, Case("op", "n", params={"max_abs": 4.8e-3}))
    assert tolerances["lens"] is EXACT
    got, want = {"out": torch.tensor([2.0]).bfloat16()}, {"out": _double(2.005), "out:bound": _double(2.0)}
    assert not compare_outputs(got, want, tolerances).ok
    assert compare_outputs(got, want, tolerances_of(workloads, Case("op", "n"))).ok


def test_a_companion_is_no_output():
    want = {"out": _double(1.0), "out:bound": _double(1.0), "lens": torch.tensor([1])}
    got = {"out": torch.ones(1).bfloat16(), "lens": torch.tensor([1])}
    assert compare_outputs(got, want, {"out": SPARSE, "lens": EXACT}).ok
    with_it = got | {"out:bound": _double(1.0)}
    assert "outputs are" in compare_outputs(with_it, want, {"out": SPARSE, "lens": EXACT}).reason


# bf16 neighbours

NEIGHBOURS = UlpTolerance(equal_ratio=0.0)


@pytest.mark.parametrize(
    ("got", "want", "ulp"),
    [
        pytest.param(0x3F80, 0x3F7F, 1, id="across-a-binade"),
        pytest.param(0x3F81, 0x3F7F, 2, id="two-across-a-binade"),
        pytest.param(0x0001, 0x0000, 1, id="smallest-subnormal-to-zero"),
        pytest.param(0x8001, 0x0000, 1, id="below-zero-to-zero"),
        pytest.param(0x8001, 0x0001, 2, id="across-zero"),
        pytest.param(0x8000, 0x0000, 0, id="minus-zero-is-zero"),
        pytest.param(0x8000, 0x0001, 1, id="minus-zero-to-smallest"),
        pytest.param(0xBF80, 0xBF7F, 1, id="negative-across-a-binade"),
        pytest.param(0x3F80, 0xBF80, 2 * 0x3F80, id="other-sign"),
        pytest.param(0x7FC1, 0x7FC0, 0, id="any-nan"),
        pytest.param(0x7F80, 0x7F80, 0, id="infinity"),
    ],
)
def test_ulps_count_the_floats_in_between(got, want, ulp):
    verdict = compare("out", _bf16(got), _bf16(want), NEIGHBOURS)
    assert verdict.figures["max_ulp"] == ulp
    assert verdict.ok is (ulp <= 1)


def test_the_largest_float_is_no_neighbour_of_infinity():
    assert "non-finite" in compare("out", _bf16(0x7F7F), _bf16(0x7F80), NEIGHBOURS).reason


@pytest.mark.parametrize(("unequal", "ok"), [(1, True), (2, False)])
def test_the_ratio_of_equal_elements_counts(unequal, ok):
    want = torch.ones(1000).bfloat16()
    got = want.clone()
    got[:unequal] = _bf16(0x3F81)
    verdict = compare("out", got, want, UlpTolerance())
    assert verdict.ok is ok
    assert verdict.figures["equal_ratio"] == 1 - unequal / 1000
    assert verdict.matched_ratio == 1.0
    if not ok:
        assert verdict.reason == "out: 2 of 1000 elements are not equal, more than 0.100%"


def test_one_far_element_fails_however_many_are_equal():
    want = torch.ones(100_000).bfloat16()
    got = want.clone()
    got[77] = _bf16(0x3F82)
    verdict = compare("out", got, want, UlpTolerance())
    assert verdict.reason == "out: 1 of 100000 elements more than 1 ulp away"
    assert (verdict.first_bad.index, verdict.max_abs) == ((77,), 2.0**-6)


def test_figures_of_several_outputs_are_the_worst_of_them():
    want = {name: torch.ones(4000).bfloat16() for name in "ab"}
    got = {name: value.clone() for name, value in want.items()}
    got["a"][0] = _bf16(0x3F81)
    verdict = compare_outputs(got, want, dict.fromkeys("ab", UlpTolerance()))
    assert verdict.figures == {"max_ulp": 1.0, "equal_ratio": 1 - 1 / 4000}
