"""The sparse prefill oracle against naive arithmetic, the op's argument checks, and its workloads' promises."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.kernels

from deepinfer_sm80.ops.sparse_prefill import reference, sparse_prefill, workloads  # noqa: E402

from deepinfer_cli.validate.numerics import check_case  # noqa: E402
from tests.ops.wrong_sparse_prefill import WRONG  # noqa: E402

CASES = {case.name: case for case in workloads.cases("smoke")}


def naive(inputs: dict[str, Any], token: int, head: int) -> tuple[list[float], list[float]]:
    """One head's output and error measure in Python floats, number by number."""
    kv, sink = inputs["kv"], inputs["sink"]
    if inputs.get("indptr") is not None:
        begin, end = inputs["indptr"][token : token + 2].tolist()
        slots = inputs["indices"][begin:end].tolist()
    else:
        slots = inputs["indices"][token].tolist()[: int(inputs["lengths"][token])]
    query = inputs["q"][token, head].tolist()
    terms = []
    for slot in slots:
        if 0 <= slot < kv.shape[0]:
            row = kv[slot].tolist()
            terms.append((inputs["scale"] * math.fsum(a * b for a, b in zip(query, row, strict=True)), row))
    share = -math.inf if sink is None else float(sink[head])
    if not terms:
        return [0.0] * 512, [0.0] * 512
    top = max(share, *(score for score, _ in terms))
    weights = [math.exp(score - top) for score, _ in terms]
    total = math.fsum(weights) + math.exp(share - top)
    pairs = [(weight / total, row) for weight, (_, row) in zip(weights, terms, strict=True)]
    out = [math.fsum(weight * row[dim] for weight, row in pairs) for dim in range(512)]
    size = [math.fsum(weight * abs(row[dim]) for weight, row in pairs) for dim in range(512)]
    return out, [abs(value) + other for value, other in zip(out, size, strict=True)]


@pytest.mark.parametrize(
    "name",
    ["usual", "dense", "two-rows", "one-row-no-sink", "sink-dominated", "sink-minus-infinity", "holes-dense",
     "no-rows-no-sink", "all-invalid", "large-scores", "ragged-from-the-middle", "dense-lengths-past-width"],
)  # fmt: skip
def test_the_oracle_equals_naive_arithmetic(name: str) -> None:
    inputs = workloads.make_inputs(CASES[name], "cpu")
    arguments = {key: value for key, value in inputs.items() if key != "out"}
    out, bound = reference.attend(**arguments)
    for token in range(out.shape[0]):
        for head in (0, 7):
            want, size = naive(inputs, token, head)
            torch.testing.assert_close(out[token, head], torch.tensor(want).double(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(bound[token, head], torch.tensor(size).double(), rtol=1e-6, atol=1e-7)


def test_the_oracle_passes_every_smoke_case() -> None:
    for case in CASES.values():
        verdict, _done = check_case(workloads, case, "cpu", reference.sparse_prefill)
        assert verdict.ok, f"{case.id}: {verdict.reason}"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails(name: str) -> None:
    def fails(case: Any) -> bool:
        try:
            reason = check_case(workloads, case, "cpu", WRONG[name])[0].reason
        except (IndexError, RuntimeError, ValueError):
            return False
        return "elements" in reason or "cosine" in reason

    # the smallest first: one that shows it is enough
    cases = sorted(CASES.values(), key=lambda case: case.params["heads"])
    assert any(fails(case) for case in cases)


@pytest.mark.parametrize("name", ["one-row", "two-rows", "sink-dominated"])
def test_a_missing_sink_shows_where_it_must(name: str) -> None:
    assert not check_case(workloads, CASES[name], "cpu", WRONG["missing-sink"])[0].ok


def test_names_are_unique() -> None:
    names = [case.name for case in (*workloads.cases(), *workloads.bench_cases())]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["usual", "dense", "holes", "repeated-slots"])
def test_rows_that_no_slot_names_are_nan(name: str) -> None:
    inputs = workloads.make_inputs(CASES[name], "cpu")
    assert inputs["kv"].isnan().any()
    assert inputs["out"].isnan().all()
    # the rows in front of and behind the cache, which slots -1 and R would reach
    kv = inputs["kv"]
    around = torch.as_strided(kv, (kv.shape[0] + 2, 512), kv.stride(), kv.storage_offset() - kv.stride(0))
    assert around[0].isnan().all()
    assert around[-1].isnan().all()


def test_flops_and_bytes_of_a_bench_case() -> None:
    case = next(case for case in workloads.bench_cases() if case.name == "2048-tokens-64-heads")
    assert workloads.flops(case) == 2048 * 64 * 640 * 2 * 2 * 512
    assert workloads.bytes_moved(case) == 2 * 2048 * 64 * 1024 + (8192 + 127 + 2048) * 1024 + 2048 * 640 * 4


def call(**changes: Any) -> None:
    """The op on a valid call with some arguments changed."""
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 8, 512, dtype=torch.bfloat16),
        "kv": torch.zeros(5, 512, dtype=torch.bfloat16),
        "out": torch.zeros(2, 8, 512, dtype=torch.bfloat16),
        "scale": 1.0,
        "sink": torch.zeros(8),
        "indices": torch.zeros(2, 4, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
    }
    sparse_prefill(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(2, 8, 512)}, TypeError, "q must be torch.bfloat16"),
        ({"q": torch.zeros(2, 8, 448, dtype=torch.bfloat16)}, ValueError, "q must have shape"),
        ({"kv": torch.zeros(5, 1, 512, dtype=torch.bfloat16)}, ValueError, "kv must have shape"),
        ({"kv": torch.zeros(512, 512, dtype=torch.bfloat16).T}, ValueError, "last dim must be contiguous"),
        ({"out": torch.zeros(3, 8, 512, dtype=torch.bfloat16)}, ValueError, "out must have shape"),
        ({"indices": torch.zeros(2, 4, dtype=torch.int64)}, TypeError, "indices must be torch.int32"),
        ({"indices": torch.zeros(8, dtype=torch.int32)}, ValueError, "indices must have shape"),
        ({"lengths": torch.zeros(1, dtype=torch.int32)}, ValueError, "lengths must have 2 entries"),
        ({"lengths": None}, ValueError, "exactly one of lengths"),
        ({"indptr": torch.zeros(3, dtype=torch.int32)}, ValueError, "exactly one of lengths"),
        ({"sink": torch.zeros(7)}, ValueError, "sink must have 8 entries"),
        ({"sink": torch.zeros(8, dtype=torch.bfloat16)}, TypeError, "sink must be torch.float32"),
        (
            {"lengths": None, "indptr": torch.zeros(2, dtype=torch.int32), "indices": torch.zeros(8, dtype=torch.int32)},
            ValueError,
            "indptr must have 3 entries",
        ),
        (
            {name: torch.zeros(2, 136, 512, dtype=torch.bfloat16) for name in ("q", "out")},
            ValueError,
            "1 to 128 heads",
        ),
    ],
)  # fmt: skip
def test_arguments_are_checked(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)
