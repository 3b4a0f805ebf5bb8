"""What the workloads of the sparse attentions share: sizes of inputs, row counts, sinks, strided memory, the oracle's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .spec import SparseTolerance

TOLERANCES = {"out": SparseTolerance()}
# fills outputs, gaps, and whatever must not be read
POISON = float("nan")
SCALE = 512**-0.5
# kind → (size of q, size of kv); at (1, 1) scores have the spread of a unit normal
SIZES = {"usual": (1.0, 1.0), "flat": (0.05, 1.0), "peaked": (8.0, 1.0), "large": (30.0, 30.0), "tall": (1e-3, 1e3)}  # fmt: skip

# slots per token: a number for all, a list, or a range (low, high) to draw from
Rows = int | tuple[int, int] | list[int]


def row_counts(rows: Rows, tokens: int, generator: torch.Generator) -> list[int]:
    """Slots of each token."""
    if isinstance(rows, int):
        return [rows] * tokens
    if isinstance(rows, list):
        return rows
    return torch.randint(rows[0], rows[1] + 1, (tokens,), generator=generator).tolist()


def total_rows(rows: Rows, tokens: int) -> int:
    """Slots of all tokens; of a range what is drawn on average."""
    if isinstance(rows, list):
        return sum(rows)
    return tokens * rows if isinstance(rows, int) else tokens * sum(rows) // 2


def flops(heads: int, total: int) -> int:
    """Two products of 512 per head and listed row."""
    return 4 * 512 * heads * total


def with_holes(
    slots: torch.Tensor, hole: torch.Tensor, total: int, generator: torch.Generator
) -> torch.Tensor:
    """`slots` with slots that name none of `total` rows where `hole` is set."""
    wrong = torch.tensor([-1, -1, total, total + 1, -(2**31), 2**31 - 1])
    return torch.where(hole, wrong[torch.randint(len(wrong), (len(slots),), generator=generator)], slots)


def make_sink(
    kind: str, heads: int, generator: torch.Generator, device: str | torch.device
) -> torch.Tensor | None:
    """A sink per head: `usual`, `large`, `minus-infinity` for every other one, `long` with NaN behind, or `none`."""
    if kind == "none":
        return None
    sink = torch.randn(heads, generator=generator)
    if kind == "large":
        sink += 9.0
    if kind == "minus-infinity":
        sink[::2] = -float("inf")
    if kind == "long":
        sink = torch.cat([sink, torch.full((7,), POISON)])
    return sink.to(device)


def strided(
    values: torch.Tensor, heads: int, stride: int, shift: int, device: str | torch.device
) -> torch.Tensor:
    """`values` `[T, H, 512]` in NaN-filled memory with room for `heads` heads of `stride` elements per token."""
    tokens = values.shape[0]
    memory = torch.full((shift + tokens * heads * stride,), POISON, dtype=torch.bfloat16, device=device)
    view = torch.as_strided(memory, tuple(values.shape), (heads * stride, stride, 1), shift)
    view.copy_(values)
    return view


def expected(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]], inputs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The whole output of the oracle `attend`, not rounded, and its error measure as `out:bound`."""
    out = inputs["out"]
    found = {}
    results = attend(**{name: value for name, value in inputs.items() if name != "out"})
    for name, values, gap in zip(("out", "out:bound"), results, (POISON, 0.0), strict=True):
        all_of_it = torch.full(whole(out).shape, gap, dtype=torch.float64, device=out.device)
        all_of_it[:, : out.shape[1], :512] = values
        found[name] = all_of_it
    return found


def whole(out: torch.Tensor) -> torch.Tensor:
    """`out` with the gap after each head, and up to two of the spare heads after each token's."""
    heads = out.shape[1] if out.shape[0] < 2 else min(out.stride(0) // out.stride(1), out.shape[1] + 2)
    return torch.as_strided(out, (out.shape[0], heads, out.stride(1)), out.stride())
