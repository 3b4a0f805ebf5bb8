"""Second kernel of an mHC pre step: adds up the slices' parts, makes the coefficients, normalises the collapsed rows.

The first CTAs of the grid make coefficients, the others normalise: the chain of small divisions of one hides behind
the memory traffic of the other.
"""

# TileLang reads tensor types where Python has annotations
# mypy: disable-error-code="valid-type"

from typing import Any

from .coefficients import COMB, MIXES, STREAMS
from .steps import COLLAPSED, PARTS, SQRSUM

WARP = 32


def build(hidden: int, slices: int, tokens: int, threads: int) -> Any:
    """The kernel as a TIR function.

    Args:
        slices: how many parts the first kernel leaves of every token.
        tokens: tokens whose coefficients one CTA makes, a power of two.
        threads: of a CTA; a multiple of 32. A row is normalised by one CTA.
    """
    import tilelang.language as T

    warps = threads // WARP
    # warps that share the slices of one token, or tokens that a warp takes in turn
    shares = max(1, warps // tokens)
    rounds = -(-tokens * shares // warps)
    slice_rounds = -(-slices // shares)
    sums = MIXES + 1
    mix_rounds = -(-tokens // warps)
    vectors = hidden // 8
    per_thread = -(-vectors // threads)
    f32, i32, bf16 = T.float32, T.int32, T.bfloat16
    num_tokens = T.dynamic("num_tokens")

    def fast_rcp(value: Any) -> Any:
        # one instruction, 1 ulp; what an IEEE division adds is half of the time of the sinkhorn chain
        return T.call_extern("float32", "tl::fast_rcp", value)

    def fast_exp(value: Any) -> Any:
        return T.call_extern("float32", "__expf", value)

    # fmt: off
    @T.macro
    def coefficients(
        block, partial, hc_scale, hc_base, post, comb, next_pre, rms_eps, pre_eps, eps, factor, repeat, per_element,
    ):
        # fmt: on
        tid = T.get_thread_binding()
        warp, lane = tid // WARP, tid % WARP
        shared = T.alloc_shared((tokens, shares, WARP), f32)
        start = T.alloc_shared((tokens, COMB), f32)
        value = T.alloc_local((1,), f32)
        square = T.alloc_local((1,), f32)
        most = T.alloc_local((1,), f32)
        slope = T.alloc_local((1,), f32)
        base = T.alloc_local((1,), f32)
        cell = T.alloc_local((STREAMS, STREAMS), f32)
        row_sum = T.alloc_local((STREAMS,), f32)
        column_sum = T.alloc_local((STREAMS,), f32)
        row = T.alloc_local((STREAMS,), f32)
        column = T.alloc_local((STREAMS,), f32)

        # a lane keeps to one mix of all tokens
        slope[0] = hc_scale[T.min(lane // STREAMS, 2)]
        base[0] = hc_base[T.min(lane, MIXES - 1)]
        for r in T.unroll(rounds):
            item = r * warps + warp
            m, share = item // shares, item % shares
            token = block * tokens + m
            if (m < tokens) & (lane < sums) & (token < num_tokens):
                value[0] = 0.0
                for s in T.unroll(slice_rounds):
                    if s * shares + share < slices:
                        value[0] += partial[s * shares + share, token, lane]
                shared[m, share, lane] = value[0]
        T.sync_threads()
        for r in T.unroll(mix_rounds):
            m = r * warps + warp
            token = block * tokens + m
            if (m < tokens) & (token < num_tokens):
                value[0] = 0.0
                square[0] = 0.0
                for s in T.unroll(shares):
                    value[0] += shared[m, s, T.min(lane, SQRSUM)]
                    square[0] += shared[m, s, SQRSUM]
                value[0] = value[0] * T.rsqrt(square[0] * per_element + rms_eps) * slope[0] + base[0]
                # all lanes shuffle, 8 to 23 hold the residual mix: four rows of four lanes
                most[0] = T.max(value[0], T.shfl_xor(value[0], 1))
                most[0] = T.max(most[0], T.shfl_xor(most[0], 2))
                if lane < 2 * STREAMS:
                    value[0] = fast_rcp(1.0 + fast_exp(-value[0]))
                else:
                    value[0] = fast_exp(value[0] - most[0])
                square[0] = value[0] + T.shfl_xor(value[0], 1)
                square[0] += T.shfl_xor(square[0], 2)
                if lane < STREAMS:
                    next_pre[token, lane] = value[0] + pre_eps
                elif lane < 2 * STREAMS:
                    post[token, lane - STREAMS] = value[0] * factor
                elif lane < MIXES:
                    start[m, lane - 2 * STREAMS] = value[0] * fast_rcp(square[0]) + eps
        T.sync_threads()
        # One thread per token. The mix is row_j * cell_jk * column_k all the time, so that an iteration changes eight
        # factors and not sixteen cells: normalising row j divides by row_j * (sum_k cell_jk column_k) + eps, so the
        # new factor's inverse is that sum + eps * the old factor's inverse.
        token = block * tokens + tid
        if (tid < tokens) & (token < num_tokens):
            for j in T.unroll(STREAMS):
                for k in T.vectorized(STREAMS):
                    cell[j, k] = start[tid, j * STREAMS + k]
                row[j] = 1.0
                row_sum[j] = 1.0
            for k in T.unroll(STREAMS):
                column_sum[k] = ((cell[0, k] + cell[1, k]) + (cell[2, k] + cell[3, k])) + eps
                column[k] = fast_rcp(column_sum[k])
            for _ in T.serial(repeat - 1):
                for j in T.unroll(STREAMS):
                    row_sum[j] *= eps
                for k in T.unroll(STREAMS):
                    for j in T.unroll(STREAMS):
                        row_sum[j] = T.ieee_fmaf(cell[j, k], column[k], row_sum[j])
                for j in T.unroll(STREAMS):
                    row[j] = fast_rcp(row_sum[j])
                for k in T.unroll(STREAMS):
                    column_sum[k] *= eps
                for j in T.unroll(STREAMS):
                    for k in T.unroll(STREAMS):
                        column_sum[k] = T.ieee_fmaf(cell[j, k], row[j], column_sum[k])
                for k in T.unroll(STREAMS):
                    column[k] = fast_rcp(column_sum[k])
            for j in T.unroll(STREAMS):
                for k in T.unroll(STREAMS):
                    cell[j, k] *= row[j] * column[k]
                for k in T.vectorized(STREAMS):
                    comb[token, j * STREAMS + k] = cell[j, k]

    @T.macro
    def normalise(token, partial, layer_input, norm_weight, norm_eps):
        tid = T.get_thread_binding()
        rows = T.alloc_local((per_thread, 8), bf16)
        weights = T.alloc_local((per_thread, 8), bf16)
        out = T.alloc_local((8,), bf16)
        value = T.alloc_local((1,), f32)
        for q in T.unroll(per_thread):
            column = (q * threads + tid) * 8
            if column < hidden:
                for e in T.vectorized(8):
                    rows[q, e] = layer_input[token, column + e]
                for e in T.vectorized(8):
                    weights[q, e] = norm_weight[column + e]
        value[0] = 0.0
        for s in T.unroll(-(-slices // WARP)):
            at = s * WARP + tid % WARP
            if at < slices:
                value[0] += partial[at, token, COLLAPSED]
        for step in T.unroll(5):
            value[0] += T.shfl_xor(value[0], 1 << step)
        value[0] = T.rsqrt(value[0] * (1.0 / hidden) + norm_eps)
        for q in T.unroll(per_thread):
            column = (q * threads + tid) * 8
            if column < hidden:
                for e in T.vectorized(8):
                    out[e] = T.cast(T.cast(rows[q, e], f32) * value[0] * T.cast(weights[q, e], f32), bf16)
                for e in T.vectorized(8):
                    layer_input[token, column + e] = out[e]

    @T.prim_func
    def finish(
        partial: T.Tensor((slices, num_tokens, PARTS), f32),
        hc_scale: T.Tensor((3,), f32),
        hc_base: T.Tensor((MIXES,), f32),
        norm_weight: T.Tensor((hidden,), bf16),
        layer_input: T.Tensor((num_tokens, hidden), bf16),
        post: T.Tensor((num_tokens, STREAMS), f32),
        comb: T.Tensor((num_tokens, COMB), f32),
        next_pre: T.Tensor((num_tokens, STREAMS), f32),
        rms_eps: f32,
        pre_eps: f32,
        sinkhorn_eps: f32,
        post_mult: f32,
        sinkhorn_repeat: i32,
        per_element: f32,
        norm_eps: f32,
        rows_to_normalise: i32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, tokens) + rows_to_normalise, threads=threads) as block:
            if block < T.ceildiv(num_tokens, tokens):
                coefficients(
                    block, partial, hc_scale, hc_base, post, comb, next_pre,
                    rms_eps, pre_eps, sinkhorn_eps, post_mult, sinkhorn_repeat, per_element,
                )  # fmt: skip
            else:
                normalise(block - T.ceildiv(num_tokens, tokens), partial, layer_input, norm_weight, norm_eps)

    return finish
