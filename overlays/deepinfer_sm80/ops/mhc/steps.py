"""Pieces of the first kernel of an mHC pre step, which its two loops share; see `project.build`."""

# TileLang reads tensor types where Python has annotations
# mypy: disable-error-code="valid-type"

from types import SimpleNamespace
from typing import Any, Literal

from .coefficients import MIXES, STREAMS

# of each slice and token: the projections, the sum of squares of the projected row, and that of the collapsed row
PARTS = MIXES + 2
SQRSUM, COLLAPSED = MIXES, MIXES + 1

Source = Literal["residual", "x", "post"]


class Geometry:
    """What follows from a tile's size.

    Args:
        source: what is projected, see `project.build`.
        block_m, block_h, threads: tokens, columns of each stream, and threads of a tile.
    """

    def __init__(self, source: Source, block_m: int, block_h: int, threads: int) -> None:
        self.source, self.block_m, self.block_h, self.threads = source, block_m, block_h, threads
        self.streams = 1 if source == "x" else STREAMS
        self.block_k = self.streams * block_h
        # a thread's eight columns, and the tokens that a pass of all threads covers
        self.lanes = block_h // 8
        self.rows = threads // self.lanes
        self.passes = -(-block_m // self.rows)
        self.fn_vectors = MIXES * self.block_k // 4
        self.fn_passes = -(-self.fn_vectors // threads)
        # 32 lanes to a token's 24 mixes: no index is divided by 24, which is slow where it ends in 64-bit arithmetic
        self.output_passes = -(-block_m * 32 // threads)
        self.mix_size = MIXES if source == "post" else STREAMS
        self.pre_at = self.mix_size - STREAMS


def make(g: Geometry, num_tokens: Any) -> SimpleNamespace:
    """The macros for tiles of this geometry; `num_tokens` is the kernel's variable."""
    import tilelang.language as T

    source, block_m, block_h, block_k, threads = g.source, g.block_m, g.block_h, g.block_k, g.threads
    lanes, rows, passes, fn_vectors, fn_passes = g.lanes, g.rows, g.passes, g.fn_vectors, g.fn_passes
    mix_size, comb_at, pre_at = g.mix_size, STREAMS, g.pre_at
    mix_lanes = 8 if source == "post" else 1
    mix_passes = -(-block_m * mix_lanes // threads)
    bf16, f32 = T.bfloat16, T.float32

    @T.macro
    def load_fn(fn, values, column, tid):
        for p in T.unroll(fn_passes):
            v = p * threads + tid
            if v < fn_vectors:
                n = v // (block_k // 4)
                k = v % (block_k // 4) * 4
                for e in T.vectorized(4):
                    values[p, e] = fn[n, k // block_h, column + k % block_h + e]

    @T.macro
    def store_fn(values, shared, high, low, tid):
        for p in T.unroll(fn_passes):
            v = p * threads + tid
            if v < fn_vectors:
                n = v // (block_k // 4)
                k = v % (block_k // 4) * 4
                for e in T.vectorized(4):
                    high[e] = T.cast(values[p, e], bf16)
                for e in T.vectorized(4):
                    low[e] = T.cast(values[p, e] - T.cast(high[e], f32), bf16)
                for e in T.vectorized(4):
                    shared[n, k + e] = high[e]
                for e in T.vectorized(4):
                    shared[n + MIXES, k + e] = low[e]

    @T.macro
    def load_rows(residual, x, old, other, first, column, row, lane, use_pre):
        for p in T.unroll(passes):
            token = first + p * rows + row
            if (p * rows + row < block_m) & (token < num_tokens):
                for i in T.unroll(STREAMS):
                    if source != "x" or i == 0 or use_pre != 0:
                        for e in T.vectorized(8):
                            old[p, i, e] = residual[token, i, column + lane * 8 + e]
                if source != "residual":
                    for e in T.vectorized(8):
                        other[p, e] = x[token, column + lane * 8 + e]

    @T.macro
    def land(source_row, at, landing, row, extent, here):
        T.ptx_cp_async(
            T.access_ptr(landing[row, at], "w", extent=extent),
            T.access_ptr(source_row, "r", extent=extent),
            extent,
            predicate=here,
        )

    @T.macro
    def land_mix(post_mix, comb_mix, pre_mix, mix, first, tid):
        for p in T.unroll(mix_passes):
            m = (p * threads + tid) // mix_lanes
            q = (p * threads + tid) % mix_lanes
            here = first + m < num_tokens
            if m < block_m:
                if source != "post":
                    land(pre_mix[first + m, 0], 0, mix, m, STREAMS, here)
                elif q == 0:
                    land(post_mix[first + m, 0], 0, mix, m, STREAMS, here)
                elif q <= STREAMS:
                    land(comb_mix[first + m, (q - 1) * STREAMS], q * STREAMS, mix, m, STREAMS, here)
                elif q == STREAMS + 1:
                    land(pre_mix[first + m, 0], pre_at, mix, m, STREAMS, here)

    @T.macro
    def land_rows(residual, x, landed, first, column, row, lane):
        for p in T.unroll(passes):
            m = p * rows + row
            here = first + m < num_tokens
            if m < block_m:
                for i in T.unroll(STREAMS):
                    land(
                        residual[first + m, i, column + lane * 8], i * block_h + lane * 8, landed, m, 8, here
                    )
                if source != "residual":
                    land(x[first + m, column + lane * 8], STREAMS * block_h + lane * 8, landed, m, 8, here)

    @T.macro
    def take_rows(landed, old, other, p, m, lane):
        for i in T.unroll(STREAMS):
            for e in T.vectorized(8):
                old[p, i, e] = landed[m, i * block_h + lane * 8 + e]
        if source != "residual":
            for e in T.vectorized(8):
                other[p, e] = landed[m, STREAMS * block_h + lane * 8 + e]

    @T.macro
    def square(r, p, q, values):
        for e in T.unroll(8):
            r.squares[p, q] += T.cast(values[e], f32) * T.cast(values[e], f32)

    @T.macro
    def post_stream(r, p, j):
        for e in T.unroll(8):
            r.chain[e] = r.weight[j] * T.cast(r.other[p, e], f32)
        for i in T.unroll(STREAMS):
            for e in T.unroll(8):
                r.chain[e] = T.ieee_fmaf(
                    r.weight[comb_at + i * STREAMS + j], T.cast(r.old[p, i, e], f32), r.chain[e]
                )
        for e in T.vectorized(8):
            r.fresh[e] = T.cast(r.chain[e], bf16)

    @T.macro
    def collapse_stream(r, j):
        if j == 0:
            for e in T.vectorized(8):
                r.stream_0[e] = r.fresh[e]
            for e in T.unroll(8):
                r.total[e] = r.weight[pre_at] * T.cast(r.fresh[e], f32)
                r.mean[e] = T.cast(r.fresh[e], f32)
        else:
            for e in T.unroll(8):
                r.total[e] = T.ieee_fmaf(r.weight[pre_at + j], T.cast(r.fresh[e], f32), r.total[e])
                r.mean[e] += T.cast(r.fresh[e], f32)

    @T.macro
    def advance(
        r, mix, landed, a_shared, first, column, tid, new_residual, collapsed, aux, use_pre, write_aux
    ):
        row, lane = tid // lanes, tid % lanes
        for p in T.unroll(passes):
            m = p * rows + row
            token = first + m
            for q in T.unroll(mix_size // 4):
                for e in T.vectorized(4):
                    r.weight[q * 4 + e] = mix[T.min(m, block_m - 1), q * 4 + e]
            if landed is not None:
                take_rows(landed, r.old, r.other, p, T.min(m, block_m - 1), lane)
            for j in T.unroll(STREAMS):
                if source == "post":
                    post_stream(r, p, j)
                    if (m < block_m) & (token < num_tokens):
                        T.stg128(new_residual[token, j, column + lane * 8], r.fresh_raw[0:4])
                else:
                    for e in T.vectorized(8):
                        r.fresh[e] = r.old[p, j, e]
                if source != "x":
                    if m < block_m:
                        for e in T.vectorized(8):
                            a_shared[m, j * block_h + lane * 8 + e] = r.fresh[e]
                    square(r, p, 0, r.fresh)
                collapse_stream(r, j)
            if source == "x":
                if m < block_m:
                    for e in T.vectorized(8):
                        a_shared[m, lane * 8 + e] = r.other[p, e]
                for e in T.unroll(8):
                    r.squares[p, 0] += T.cast(r.other[p, e], f32) * T.cast(r.other[p, e], f32)
            for e in T.vectorized(8):
                r.out[e] = T.cast(r.total[e], bf16)
            if use_pre == 0:
                for e in T.vectorized(8):
                    r.out[e] = r.stream_0[e]
            square(r, p, 1, r.out)
            if (m < block_m) & (token < num_tokens):
                T.stg128(collapsed[token, column + lane * 8], r.out_raw[0:4])
                if source == "post" and write_aux != 0:
                    for e in T.vectorized(8):
                        r.out[e] = T.cast(r.mean[e] * 0.25, bf16)
                    T.stg128(aux[token, column + lane * 8], r.out_raw[0:4])

    @T.macro
    def leave_squares(r, partial, split, first, tid):
        row, lane = tid // lanes, tid % lanes
        for p in T.unroll(passes):
            for q in T.unroll(2):
                for step in T.unroll(lanes.bit_length() - 1):
                    r.squares[p, q] += T.shfl_xor(r.squares[p, q], 1 << step)
            m = p * rows + row
            if (lane == 0) & (m < block_m) & (first + m < num_tokens):
                partial[split, first + m, SQRSUM] = r.squares[p, 0]
                partial[split, first + m, COLLAPSED] = r.squares[p, 1]

    return SimpleNamespace(
        load_fn=load_fn,
        store_fn=store_fn,
        load_rows=load_rows,
        land_rows=land_rows,
        land_mix=land_mix,
        advance=advance,
        leave_squares=leave_squares,
    )
