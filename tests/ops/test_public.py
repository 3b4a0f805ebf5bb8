"""What the public functions refuse, and that workloads have the form that is documented."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.ops.catalog import OPS

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels


def gather_inputs(**changes: Any) -> dict[str, Any]:
    from deepinfer_sm80.ops.gather import workloads

    case = next(case for case in workloads.cases() if case.name == "starts-inside-a-page")
    return {**workloads.make_inputs(case, "cpu"), **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"out": torch.zeros(2, 50, 512)}, TypeError, "out must be torch.bfloat16, is torch.float32"),
        (
            {"out": torch.zeros(2, 50, 256, dtype=torch.bfloat16)},
            ValueError,
            r"out must have shape .*\(2, 50, 256\)",
        ),
        ({"out": torch.zeros(1, 50, 512, dtype=torch.bfloat16)}, ValueError, "out must have 2 entries"),
        ({"out": torch.zeros(2, 50, 1024, dtype=torch.bfloat16)[..., ::2]}, ValueError, "contiguous"),
        ({"k_cache": torch.zeros(9, 32, 528, dtype=torch.uint8)}, ValueError, r"584.*\(9, 32, 528\)"),
        ({"k_cache": torch.zeros(9, 32, 584)}, TypeError, "k_cache must be torch.uint8"),
        ({"block_table": torch.zeros(2, 9, dtype=torch.int64)}, TypeError, "block_table must be torch.int32"),
        (
            {"block_table": torch.zeros(1, 9, dtype=torch.int32)},
            ValueError,
            "block_table must have 2 entries",
        ),
        ({"block_size": 0}, ValueError, "block_size must be positive, is 0"),
        ({"offset": -1}, ValueError, "offset -1 is outside out"),
        ({"offset": 999}, ValueError, "offset 999 is outside out"),
        (
            {"gather_lens": torch.zeros(1, dtype=torch.int32)},
            ValueError,
            "gather_lens has 1 entries for 2 requests",
        ),
    ],
)
def test_gather_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    from deepinfer_sm80.ops.gather import gather

    with pytest.raises(error, match=message):
        gather(**gather_inputs(**changes))


def combine_inputs(**changes: Any) -> dict[str, Any]:
    from deepinfer_sm80.ops.combine import workloads

    case = next(case for case in workloads.cases() if case.name == "two-requests")
    return {**workloads.make_inputs(case, "cpu"), **changes}


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"topk_indices": torch.zeros(8, dtype=torch.int32)},
            ValueError,
            r"a row per token, has shape \(8,\)",
        ),
        ({"window_size": -1}, ValueError, "negative size: window_size=-1"),
        ({"compress_ratio": -2}, ValueError, "compress_ratio=-2"),
        ({"query_start_loc": ints(2)}, ValueError, "2 requests need .* got 2 and 2"),
        ({"gather_lens": ints(1)}, ValueError, "2 requests need .* got 1 and 3"),
        (
            {"out": (ints(12, 100), ints(12))},
            ValueError,
            r"out\[0\] must be at least 12 x 192, is \(12, 100\)",
        ),
        ({"out": (ints(11, 256), ints(12))}, ValueError, r"out\[0\] must be at least 12"),
        ({"out": (ints(12, 256), ints(11))}, ValueError, r"out\[1\] must have at least 12"),
        ({"out": (ints(12, 256, dtype=torch.int64), ints(12))}, TypeError, "out must be int32"),
        ({"out": (ints(12, 512)[:, ::2], ints(12))}, ValueError, "contiguous"),
    ],
)
def test_combine_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    from deepinfer_sm80.ops.combine import combine

    with pytest.raises(error, match=message):
        combine(**combine_inputs(**changes))


@pytest.mark.parametrize("op", OPS)
def test_cases_have_unique_names_and_json_params(op: str) -> None:
    import json

    workloads = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
    assert op == workloads.OP
    cases = [*workloads.cases("full"), *workloads.bench_cases()]
    ids = [(case.suite == "bench", case.id) for case in cases]
    assert len(set(ids)) == len(ids)
    assert all(json.dumps(dict(case.params)) for case in cases)
    # what becomes a row is read back as it was
    for case in workloads.bench_cases():
        assert json.loads(json.dumps(dict(case.params))) == dict(case.params)
        assert isinstance(case.params["tokens"], int)
    assert all(workloads.bytes_moved(case) >= 0 and workloads.flops(case) >= 0 for case in cases)
