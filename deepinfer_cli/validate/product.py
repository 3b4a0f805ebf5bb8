"""A bf16 matrix product in Triton: the yardstick for what tensor cores give through `mma.sync`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# CTAs that share rows of A run together, so that B's columns stay in L2
_GROUP = 8


# Triton looks annotations up: only those that it knows may be there
@triton.jit  # type: ignore[untyped-decorator]
def _product_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    c_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    across: tl.constexpr = N // COLUMNS
    cta = tl.program_id(0)
    band = cta // (GROUP * across)
    row0 = (band * GROUP + cta % GROUP) * ROWS
    column0 = cta % (GROUP * across) // GROUP * COLUMNS
    rows, columns, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    a_tile = a_ptr + (row0 + rows)[:, None] * K + depth[None, :]
    b_tile = b_ptr + depth[:, None] * N + (column0 + columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _step in range(0, K, DEPTH):
        total = tl.dot(tl.load(a_tile), tl.load(b_tile), total)
        a_tile += DEPTH
        b_tile += DEPTH * N
    c_tile = c_ptr + (row0 + rows)[:, None] * N + (column0 + columns)[None, :]
    tl.store(c_tile, total.to(tl.bfloat16))


def multiply(a: Any, b: Any, c: Any, tile: tuple[int, int, int, int, int]) -> int:
    """Writes `a @ b` into `c`, all bf16, contiguous, and with sizes that the tile divides.

    Args:
        tile: rows, columns and depth of a CTA's tile, warps, stages.

    Returns:
        Bytes of shared memory that one CTA takes.
    """
    rows, columns, depth, warps, stages = tile
    grid = (a.shape[0] // rows * (b.shape[1] // columns),)
    compiled = _product_kernel[grid](
        a, b, c, b.shape[1], a.shape[1], rows, columns, depth, _GROUP, num_warps=warps, num_stages=stages
    )  # fmt: skip
    return int(compiled.metadata.shared)
