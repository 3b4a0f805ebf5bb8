"""Inputs of the three writers: states of every size, positions, slots and empty caches, from a case's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# fills caches before they are written: NaN as codes, as scales and as bf16
POISON = 0xFF


def bf16_rows(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 of `shape`, whose last dim is a multiple of 64.

    `random`: normal, each 64 elements at a power of two of their own. `edges`: each 64 with an amax at, just above or just
    below 448 times a power of two, or one of the largest, smallest and zero; `modest`: the same without what overflows a
    float32 when it is squared or rotated. `nonfinite`: random with NaN and infinities.
    """
    groups = torch.randn((*shape[:-1], shape[-1] // 64, 64), generator=generator)
    powers = torch.randint(-24, 12, groups.shape[:-1], generator=generator)
    rows = torch.ldexp(groups, powers[..., None]).bfloat16()
    if kind in ("edges", "modest"):
        rows = _with_edges(rows, 100 if kind == "edges" else 40, generator)
    if kind == "nonfinite":
        odd = torch.tensor([float("nan"), float("inf"), float("-inf")]).bfloat16()
        where = torch.rand(rows.shape, generator=generator) < 0.01
        # half of the rows stay as they are: most of what follows a NaN is NaN
        where &= torch.rand(rows.shape[:1], generator=generator).view(-1, *[1] * (rows.dim() - 1)) < 0.5
        rows = torch.where(where, odd[torch.randint(3, rows.shape, generator=generator)], rows)
    return rows.flatten(-2)


def _with_edges(rows: torch.Tensor, most: int, generator: torch.Generator) -> torch.Tensor:
    """Rows scaled so that nothing is larger than their first element, which is an edge."""
    top = torch.tensor([448.0]).bfloat16().view(torch.int16)
    around = torch.stack([top - 1, top, top + 1]).view(torch.bfloat16).float().flatten()
    powers = 2.0 ** torch.arange(-40, most)
    largest = [3.3895313892515355e38] if most == 100 else []
    rare = [0.0, -0.0, 9.2e-41, 1e-4, 1.001e-4, 9.97e-5, 1.18e-38, *largest]
    edges = torch.cat([(around[:, None] * powers).flatten(), torch.tensor(rare)])
    edges = edges[torch.randint(len(edges), rows.shape[:-1], generator=generator)]
    shrunk = torch.rand(rows.shape, generator=generator) * 2 - 1
    shrunk[..., 0] = 1
    return (shrunk * edges[..., None]).bfloat16()


def positions_of(params: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    """int64 positions: a request's consecutive ones from `first` on, or random below `rows` with `scattered`."""
    tokens = params["tokens"]
    if params.get("scattered"):
        return torch.randint(table_rows(params), (tokens,), generator=generator)
    return params.get("first", 0) + torch.arange(tokens)


def table_rows(params: Mapping[str, Any]) -> int:
    """Rows of the cos/sin table: enough for every position."""
    return int(params.get("rows", params.get("first", 0) + params["tokens"] + 1))


def cos_sin_table(params: Mapping[str, Any], device: str | torch.device) -> torch.Tensor:
    """float32 cosines and sines of 32 frequencies, scaled as YaRN scales them; its rows may lie apart."""
    rows, stride = table_rows(params), params.get("table_stride", 64)
    memory = torch.full((rows * stride,), float("nan"), dtype=torch.float32, device=device)
    table = torch.as_strided(memory, (rows, 64), (stride, 1))
    frequencies = 160_000.0 ** (-torch.arange(32, dtype=torch.float64, device=device) / 32)
    angles = torch.arange(rows, dtype=torch.float64, device=device)[:, None] * frequencies
    table.copy_(torch.cat([angles.cos(), angles.sin()], dim=1) * 1.0625)
    return table


def slots_of(params: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    """int64 slots, no two alike, on the cache's last pages, some of them -1."""
    tokens, block_size = params["tokens"], params.get("block_size", 64)
    taken = pages_taken(params) * block_size
    slots = torch.randperm(taken, generator=generator)[:tokens]
    slots += (num_blocks(params) - pages_taken(params)) * block_size
    skipped = torch.rand(tokens, generator=generator) < params.get("skipped", 0.1)
    return torch.where(skipped, -1, slots)


def pages_taken(params: Mapping[str, Any]) -> int:
    """How many pages the slots lie on."""
    return -(-params["tokens"] // params.get("block_size", 64)) + 1


def num_blocks(params: Mapping[str, Any]) -> int:
    """Pages of the cache."""
    return int(params.get("num_blocks", pages_taken(params) + 1))


def empty_cache(
    params: Mapping[str, Any], record_bytes: int, align: int, device: str | torch.device
) -> torch.Tensor:
    """uint8 `[num_blocks, block_size, record_bytes]` of POISON, with gaps between its pages."""
    block_size, shift = params.get("block_size", 64), params.get("cache_shift", 0)
    stride = -(-block_size * record_bytes // align) * align + params.get("page_gap", 0)
    memory = torch.full((num_blocks(params) * stride + shift,), POISON, dtype=torch.uint8, device=device)
    shape = (num_blocks(params), block_size, record_bytes)
    return torch.as_strided(memory, shape, (stride, record_bytes, 1), shift)


def written_part(cache: torch.Tensor, slots: int, block_size: int) -> torch.Tensor:
    """The bytes of the last pages that `slots` tokens can be on, and those before them; all of a small cache."""
    size = cache.untyped_storage().nbytes()
    pages = -(-slots // block_size) + 3
    begin = max(0, size - pages * cache.stride(0)) if size > 1 << 26 else 0
    return torch.as_strided(cache, (size - begin,), (1,), begin)


def copy_of(cache: torch.Tensor) -> torch.Tensor:
    """The same cache in memory of its own, its gaps included."""
    size = cache.untyped_storage().nbytes()
    memory = torch.as_strided(cache, (size,), (1,), 0).clone()
    return torch.as_strided(memory, tuple(cache.shape), cache.stride(), cache.storage_offset())


def spaced(
    rows: torch.Tensor, stride: int, shift: int, filler: float, device: str | torch.device
) -> torch.Tensor:
    """`rows` (two dims) on `device`, with a row every `stride` elements, from element `shift` on."""
    memory = torch.full((rows.shape[0] * stride + shift,), filler, dtype=rows.dtype, device=device)
    placed = torch.as_strided(memory, tuple(rows.shape), (stride, 1), shift)
    placed.copy_(rows.to(device))
    return placed
