"""Triton kernels of `mhc_latency_floor.py`: parts of the mHC op's work; what they add up means nothing."""

# the interpreter and compiler take `a + (b,)`, and constant conditions apart from others
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def empty():
    pass


@triton.jit
def _rcp(value, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], tl.float32, True, 1)
    return 1.0 / value


@triton.jit
def _rows(
    total, source, copy, part, ROWS: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr, COPY: tl.constexpr
):
    """Adds to `total` `[256]` all of `ROWS` rows' columns of this CTA; every element stays in its thread."""
    for step in tl.static_range((ROWS * COLUMNS + 255) // 256):
        at = step * 256 + tl.arange(0, 256)
        offset = at // COLUMNS * H + part * COLUMNS + at % COLUMNS
        value = tl.load(source + offset, mask=at < ROWS * COLUMNS, other=0.0)
        if COPY:
            tl.store(copy + offset, value, mask=at < ROWS * COLUMNS)
        total += value.to(tl.float32)
    return total


@triton.jit
def _read(fn, residual, x, mixes, new, layer_input, part, T: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr, COPY: tl.constexpr):  # fmt: skip
    total = tl.zeros((256,), tl.float32)
    total = _rows(total, fn, fn, part, 96, COLUMNS, H, False)
    total = _rows(total, residual, new, part, 4 * T, COLUMNS, H, COPY)
    total = _rows(total, x, layer_input, part, T, COLUMNS, H, COPY)
    return _rows(total, mixes, mixes, 0, 1, 24 * T, 24 * T, False)


@triton.jit
def _chain(
    cells, out, first, T: tl.constexpr, WIDTH: tl.constexpr, ITERATIONS: tl.constexpr, FAST: tl.constexpr
):
    """Sinkhorn of 16 cells `[WIDTH]` as factors of rows and columns, all in registers; writes the scaled cells."""
    row, column = (), ()
    for k in tl.static_range(4):
        column = column + (_rcp((cells[k] + cells[4 + k]) + (cells[8 + k] + cells[12 + k]), FAST),)
    for j in tl.static_range(4):
        row = row + (column[j] * 0.0 + 1.0,)
    for _ in range(ITERATIONS - 1):
        row = _factors(cells, column, 4, 1, FAST)
        column = _factors(cells, row, 1, 4, FAST)
    lane = tl.arange(0, WIDTH)
    for i in tl.static_range(16):
        tl.store(out + (first + lane) * 16 + i, cells[i] * row[i // 4] * column[i % 4], mask=lane < T)


@triton.jit
def _factors(cells, other, OUTER: tl.constexpr, INNER: tl.constexpr, FAST: tl.constexpr):
    made = ()
    for j in tl.static_range(4):
        left = cells[j * OUTER] * other[0] + cells[j * OUTER + INNER] * other[1]
        right = cells[j * OUTER + 2 * INNER] * other[2] + cells[j * OUTER + 3 * INNER] * other[3]
        made = made + (_rcp(left + right, FAST),)
    return made


@triton.jit
def _finish(
    sums, out, first, T: tl.constexpr, WIDTH: tl.constexpr, ITERATIONS: tl.constexpr, FAST: tl.constexpr
):
    """The chain for `T` tokens whose sums lie in memory; `.cg`: another CTA may have written them just now."""
    lane = tl.arange(0, WIDTH)
    cells = ()
    for i in tl.static_range(16):
        value = tl.load(sums + (first + lane) * 24 + 8 + i, mask=lane < T, other=0.0, cache_modifier=".cg")
        cells = cells + (tl.abs(value) + 1.0,)
    _chain(cells, out, first, T, WIDTH, ITERATIONS, FAST)


@triton.jit
def _add_up(parts, token, PARTS: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """`[WIDTH]`: the sums of all CTAs' parts, `USED` of them from this token's on."""
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((LINES, WIDTH), tl.float32)
    for start in tl.static_range(0, PARTS, LINES):
        line = start + tl.arange(0, LINES)[:, None]
        mask = (line < PARTS) & (column < USED)
        total += tl.load(
            parts + line * SUMS + token * 24 + column, mask=mask, other=0.0, cache_modifier=".cg"
        )
    return tl.sum(total, 0)


@triton.jit
def _one_token(
    parts, out, token, PARTS: tl.constexpr, SUMS: tl.constexpr, ITERATIONS: tl.constexpr, FAST: tl.constexpr
):
    total = _add_up(parts, token, PARTS, 32, 32, 24, SUMS)
    cells = ()
    for i in tl.static_range(16):
        cells = cells + (tl.abs(tl.gather(total, tl.full((32,), 8 + i, tl.int32), 0)) + 1.0,)
    _chain(cells, out, token, 1, 32, ITERATIONS, FAST)


@triton.jit
def chain(sums, out, T: tl.constexpr, ITERATIONS: tl.constexpr, FAST: tl.constexpr):
    _finish(sums, out, 0, T, 16, ITERATIONS, FAST)


@triton.jit
def second(parts, out, PARTS: tl.constexpr, SUMS: tl.constexpr, ITERATIONS: tl.constexpr, FAST: tl.constexpr):
    _one_token(parts, out, tl.program_id(0), PARTS, SUMS, ITERATIONS, FAST)


@triton.jit
def _wait(
    parts,
    out,
    counters,
    token,
    PARTS: tl.constexpr,
    SUMS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FAST: tl.constexpr,
):
    # this CTA starts after all that it waits for, or beside them
    seen = tl.load(counters + token * 32, volatile=True)
    while seen < PARTS:
        seen = tl.load(counters + token * 32, volatile=True)
    tl.debug_barrier()
    _one_token(parts, out, token, PARTS, SUMS, ITERATIONS, FAST)
    tl.store(counters + token * 32, 0)


# MODE 0: leave parts. 1: the last CTA adds them up. 2: one more CTA for each token waits for them. 3: atomic sums.
@triton.jit
def first(
    fn, residual, x, mixes, new, layer_input, parts, sums, out, counters, MODE: tl.constexpr, COPY: tl.constexpr,
    COLUMNS: tl.constexpr, H: tl.constexpr, T: tl.constexpr, ITERATIONS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    PARTS: tl.constexpr = H // COLUMNS
    SUMS: tl.constexpr = 24 * T
    at = tl.arange(0, 256)
    if part < PARTS:
        total = _read(fn, residual, x, mixes, new, layer_input, part, T, COLUMNS, H, COPY)
        if MODE == 3:
            tl.atomic_add(sums + at, total, sem="relaxed")
            tl.atomic_add(sums + 256 + at, total, mask=at < SUMS - 256, sem="relaxed")
        else:
            tl.store(parts + part * SUMS + at, total)
            tl.store(parts + part * SUMS + 256 + at, total, mask=at < SUMS - 256)
        if MODE != 0:
            tl.debug_barrier()
        if MODE == 2:
            lane = tl.arange(0, 16)
            tl.atomic_add(counters + lane * 32, 1, mask=lane < T, sem="release")
        if MODE == 1 or MODE == 3:
            if tl.atomic_add(counters, 1, sem="acq_rel") == PARTS - 1:
                tl.debug_barrier()
                if MODE == 1:
                    tl.store(sums + tl.arange(0, 512), _add_up(parts, 0, PARTS, 8, 512, SUMS, SUMS))
                    tl.debug_barrier()
                _finish(sums, out, 0, T, 16, ITERATIONS, FAST)
                tl.store(counters, 0)
                if MODE == 3:
                    tl.debug_barrier()
                    tl.store(sums + tl.arange(0, 512), tl.zeros((512,), tl.float32))
    elif MODE == 2:
        _wait(parts, out, counters, part - PARTS, PARTS, SUMS, ITERATIONS, FAST)
