"""The mHC post kernel: new residual streams, and with them, if asked for, their sum of squares per token."""

# TileLang reads tensor types where Python has annotations
# mypy: disable-error-code="valid-type"

from typing import Any

from .coefficients import COMB, STREAMS

WARP = 32


def build(hidden: int, threads: int, sqrsum: bool) -> Any:
    """The kernel as a TIR function.

    Args:
        threads: of a CTA, a multiple of 32; each takes eight columns.
        sqrsum: also sum the squares; a CTA then takes a whole token.
    """
    import tilelang.language as T

    columns = threads * 8
    parts = -(-hidden // columns)
    if sqrsum and parts != 1:
        raise ValueError(f"{threads} threads do not cover {hidden} columns")
    warps = threads // WARP
    f32, f64, bf16 = T.float32, T.float64, T.bfloat16
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def body(residual, x, post_mix, comb_mix, new_residual, sums):
        with T.Kernel(num_tokens, parts, threads=threads) as (token, part):
            tid = T.get_thread_binding()
            weight = T.alloc_local((STREAMS + COMB,), f32)
            old = T.alloc_local((STREAMS, 8), bf16)
            other = T.alloc_local((8,), bf16)
            # what is stored as one access of 16 bytes; nvcc makes four of a plain store here
            fresh_raw = T.alloc_local((4,), T.uint32)
            fresh = T.view(fresh_raw, (8,), bf16)
            chain = T.alloc_local((8,), f32)
            square = T.alloc_local((1,), f32)
            lost = T.alloc_local((1,), f32)
            before = T.alloc_local((1,), f32)
            value = T.alloc_local((1,), f32)
            gained = T.alloc_local((1,), f32)
            total = T.alloc_local((1,), f64)
            shared = T.alloc_shared((warps,), f64)
            column = part * columns + tid * 8
            if column < hidden:
                for i in T.unroll(STREAMS):
                    for e in T.vectorized(8):
                        old[i, e] = residual[token, i, column + e]
                for e in T.vectorized(8):
                    other[e] = x[token, column + e]
            for e in T.vectorized(STREAMS):
                weight[e] = post_mix[token, e]
            for i in T.unroll(STREAMS):
                for e in T.vectorized(STREAMS):
                    weight[STREAMS + i * STREAMS + e] = comb_mix[token, i * STREAMS + e]
            total[0] = 0.0
            if column < hidden:
                square[0] = 0.0
                lost[0] = 0.0
                for j in T.unroll(STREAMS):
                    for e in T.unroll(8):
                        chain[e] = weight[j] * T.cast(other[e], f32)
                    for i in T.unroll(STREAMS):
                        for e in T.unroll(8):
                            chain[e] = T.ieee_fmaf(
                                weight[STREAMS + i * STREAMS + j], T.cast(old[i, e], f32), chain[e]
                            )
                    for e in T.vectorized(8):
                        fresh[e] = T.cast(chain[e], bf16)
                    T.stg128(new_residual[token, j, column], fresh_raw[0:4])
                    if sqrsum:
                        for e in T.unroll(8):
                            value[0] = T.cast(fresh[e], f32)
                            value[0] = T.ieee_mul(value[0], value[0])
                            before[0] = square[0]
                            square[0] = T.ieee_add(before[0], value[0])
                            # Knuth's two-sum: a bf16's square is exact in float32, the rest of the sum is kept
                            gained[0] = T.ieee_sub(square[0], before[0])
                            lost[0] += T.ieee_add(
                                T.ieee_sub(before[0], T.ieee_sub(square[0], gained[0])),
                                T.ieee_sub(value[0], gained[0]),
                            )
                # float64 from here on, which cards without fast float64 could not do for every element
                if sqrsum:
                    total[0] += T.cast(square[0], f64) + T.cast(lost[0], f64)
            if sqrsum:
                for step in T.unroll(5):
                    total[0] += T.shfl_xor(total[0], 1 << step)
                if tid % WARP == 0:
                    shared[tid // WARP] = total[0]
                T.sync_threads()
                if tid == 0:
                    for w in T.unroll(warps - 1):
                        total[0] += shared[w + 1]
                    sums[token] = T.cast(total[0], f32)

    stream_shape, row_shape = (num_tokens, STREAMS, hidden), (num_tokens, hidden)

    if sqrsum:

        @T.prim_func
        def post_with_sqrsum(
            residual: T.Tensor(stream_shape, bf16),
            x: T.Tensor(row_shape, bf16),
            post_mix: T.Tensor((num_tokens, STREAMS), f32),
            comb_mix: T.Tensor((num_tokens, COMB), f32),
            new_residual: T.Tensor(stream_shape, bf16),
            sums: T.Tensor((num_tokens,), f32),
        ):
            body(residual, x, post_mix, comb_mix, new_residual, sums)

        return post_with_sqrsum

    @T.prim_func
    def post(
        residual: T.Tensor(stream_shape, bf16),
        x: T.Tensor(row_shape, bf16),
        post_mix: T.Tensor((num_tokens, STREAMS), f32),
        comb_mix: T.Tensor((num_tokens, COMB), f32),
        new_residual: T.Tensor(stream_shape, bf16),
    ):
        body(residual, x, post_mix, comb_mix, new_residual, None)

    return post
