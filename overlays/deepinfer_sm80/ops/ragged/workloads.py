"""Workloads of `ragged`: cases, inputs and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..spec import Case, Tolerance, case_maker
from . import build_ragged, reference

OP = "ragged"
TOLERANCES = {"flat": Tolerance(), "indptr": Tolerance()}
# fills the gaps between the input's rows: an entry of a table this size is none of a case's
POISON = 1 << 30
_case = case_maker(OP)

_SMOKE = (
    _case("one-row", tokens=1, width=128),
    _case("one-wide-row", tokens=1, width=640),
    _case("one-row-of-several-tiles", tokens=1, width=2176, num_rows=9000),
    _case("one-entry", tokens=1, width=1, lengths=[1], holes=0.0),
    _case("swa-decode", tokens=6, width=128),
    _case("swa-decode-prefixes", tokens=6, width=128, compact=False),
    _case("rows-of-every-length", tokens=130, width=128, lengths=list(range(130))),
    _case("rows-of-every-length-prefixes", tokens=130, width=128, lengths=list(range(130)), compact=False),
    _case("known-table", tokens=24, width=128, num_rows=900),
    _case("known-table-prefixes", tokens=24, width=128, num_rows=900, compact=False),
    _case("odd-width", tokens=21, width=37, num_rows=50),
    _case("odd-width-prefixes", tokens=21, width=37, compact=False),
    _case("combined-rows", tokens=9, width=640, num_rows=5000),
    _case("combined-rows-prefixes", tokens=9, width=640, num_rows=5000, compact=False),
    _case("several-tiles", tokens=5, width=2176, num_rows=9000),
    _case("several-tiles-prefixes", tokens=5, width=2176, compact=False),
    _case("two-launches", tokens=301, width=128, num_rows=900),
    _case("two-launches-wide", tokens=37, width=1100, num_rows=900),
    _case("only-holes", tokens=20, width=70, holes=1.0),
    _case("only-holes-prefixes", tokens=20, width=70, holes=1.0, num_rows=9, compact=False),
    _case("no-holes", tokens=40, width=128, holes=0.0),
    _case("lengths-below-0-and-past-the-row", tokens=6, width=30, lengths=[-5, 99, 0, 30, 31, -1]),
    _case("lengths-below-0-and-past-the-row-prefixes", tokens=6, width=30, lengths=[-5, 99, 0, 30, 31, -1],
          compact=False),
    _case("no-tokens", tokens=0, width=128),
    _case("no-columns", tokens=7, width=0),
    _case("no-columns-prefixes", tokens=7, width=0, compact=False),
    _case("empty-table", tokens=5, width=64, num_rows=0),
    _case("row-gaps", tokens=40, width=100, row_gap=28),
    _case("columns-apart", tokens=20, width=40, column_stride=2),
    _case("odd-address", tokens=20, width=40, shift=1),
    _case("three-dims", tokens=9, width=64, three_dims=True),
    _case("int64-inputs", tokens=9, width=64, int64=True),
)  # fmt: skip
_FULL = (
    _case("2000-rows", "full", tokens=2000, width=128, gpu_only=True),
    _case("2000-rows-prefixes", "full", tokens=2000, width=128, compact=False, gpu_only=True),
    _case("chunk", "full", tokens=2048, width=640, num_rows=8320, gpu_only=True),
    _case("16384-rows", "full", tokens=16384, width=130, num_rows=70_000, gpu_only=True),
    _case("16384-rows-prefixes", "full", tokens=16384, width=130, compact=False, gpu_only=True),
    _case("widest", "full", tokens=1000, width=2176, num_rows=70_000, gpu_only=True),
    # a row's start does not fit in 32 bits of bytes
    _case("input-over-2GiB", "full", tokens=1100, width=128, row_gap=500_000, gpu_only=True, memory_bytes=3 << 30),
)  # fmt: skip


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """The sliding-window rows of a decode batch, and a prefill chunk's combined rows."""
    shapes = ((1, 128), (6, 128), (24, 128), (96, 128), (1536, 128), (2048, 640))
    return tuple(
        _case(f"{tokens}x{width}", "bench", tokens=tokens, width=width, compact=True, gpu_only=True)
        for tokens, width in shapes
    )


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `build_ragged`, made from the case's seed."""
    params = case.params
    generator = torch.Generator().manual_seed(case.seed)
    tokens, width = params["tokens"], params["width"]
    num_rows = params.get("num_rows", -1)
    lengths = params.get("lengths")
    if lengths is None:
        lengths = torch.randint(0, width + 1, (tokens,), generator=generator)
    dtype = torch.int64 if params.get("int64") else torch.int32
    return {
        "indices": _make_indices(params, num_rows, dtype, generator, device),
        "lengths": torch.as_tensor(lengths).to(dtype).to(device),
        "num_rows": num_rows,
        "compact": params.get("compact", True),
    }


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's outputs."""
    return _outputs(reference.build_ragged(**inputs))


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place."""
    return _outputs((function or build_ragged)(**inputs))


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The same call for stock's function, whose release decides whether it compacts (every `style`)."""
    return {name: value for name, value in inputs.items() if name != "compact"}


def defined(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What stock defines of its outputs: `flat` up to the last row's end."""
    flat, indptr = outputs["flat"], outputs["indptr"]
    return {"flat": flat[: int(indptr[-1])], "indptr": indptr}


def bytes_moved(case: Case) -> int:
    """Bytes that must be read and written: half of a row on average, in and out, its length and its start."""
    tokens, width = case.params["tokens"], case.params["width"]
    return int(4 * tokens * (width // 2 + width // 2 + 2))


def flops(case: Case) -> int:
    """None worth counting."""
    return 0


def _make_indices(
    params: Mapping[str, Any],
    num_rows: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: str | torch.device,
) -> torch.Tensor:
    """Random indices with holes: -1, another negative number, or just past the table if its size is known."""
    tokens, width = params["tokens"], params["width"]
    values = torch.randint(max(num_rows, 1) if num_rows >= 0 else 1000, (tokens, width), generator=generator)
    past = num_rows if num_rows >= 0 else -1
    wrong = torch.tensor([-1, -1, -7, past])[torch.randint(4, (tokens, width), generator=generator)]
    holes = torch.rand((tokens, width), generator=generator) < params.get("holes", 0.2)
    values = torch.where(holes | torch.tensor(num_rows == 0), wrong, values).to(dtype)
    column_stride, shift = params.get("column_stride", 1), params.get("shift", 0)
    row_stride = width * column_stride + params.get("row_gap", 0)
    memory = torch.full((tokens * row_stride + shift,), POISON, dtype=dtype, device=device)
    indices = torch.as_strided(memory, (tokens, width), (row_stride, column_stride), shift)
    indices.copy_(values.to(device))
    return indices.view(tokens, 1, width) if params.get("three_dims") else indices


def _outputs(result: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    flat, indptr = result
    return {"flat": flat, "indptr": indptr}
