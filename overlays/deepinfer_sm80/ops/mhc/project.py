"""First kernel of an mHC pre step: one pass over the residual that yields everything that needs all of it.

A CTA takes `block_m` tokens and a slice of the hidden dimension, of all four streams. It makes the new residual (when
fused with post), the collapse, which is ready because its pre-mix comes from the step before, and this slice's part of
the 24 projections and of two sums of squares. The finishing kernel adds the parts up.
"""

# TileLang reads tensor types where Python has annotations
# mypy: disable-error-code="valid-type"

from typing import Any, Literal

STREAMS = 4
MIXES = STREAMS * (STREAMS + 2)
# of each slice and token: the projections, the sum of squares of the projected row, and that of the collapsed row
PARTS = MIXES + 2
SQRSUM, COLLAPSED = MIXES, MIXES + 1

Source = Literal["residual", "x", "post"]


def build(hidden: int, source: Source, block_m: int, block_h: int, blocks: int, threads: int) -> Any:
    """The kernel as a TIR function.

    fn is split into two bf16 terms, which tensor cores multiply at every number of tokens: at 1, 6 and 12 the best
    tiles took 4.1, 4.7 and 4.9 us, the best that multiplied in float32 without tensor cores 4.1, 5.8 and 6.9.

    Args:
        source: what is projected: the residual as it is, another row `x` `[T, hidden]`, or the residual after post.
        block_m, block_h, blocks: tokens, columns at once and column blocks of a CTA.
    """
    import tilelang.language as T

    streams = 1 if source == "x" else STREAMS
    block_k = streams * block_h
    slices = hidden // (block_h * blocks)
    # a thread's eight columns, and the tokens that a pass of all threads covers
    lanes = block_h // 8
    rows = threads // lanes
    passes = -(-block_m // rows)
    fn_vectors = MIXES * block_k // 4
    fn_passes = -(-fn_vectors // threads)
    # 32 lanes to a token's 24 mixes: no index is divided by 24, which is slow where it ends in 64-bit arithmetic
    output_passes = -(-block_m * 32 // threads)
    mix_size = MIXES if source == "post" else STREAMS
    comb_at, pre_at = STREAMS, mix_size - STREAMS
    mix_lanes = 8 if source == "post" else 1
    mix_passes = -(-block_m * mix_lanes // threads)
    # With one block of columns nothing is prefetched. Its rows then travel as asynchronous copies: ptxas would issue
    # plain loads of them only after fn has arrived, and wait for memory twice.
    async_rows = blocks == 1
    landed_shape = block_m, (STREAMS + (source != "residual")) * block_h
    bf16, f32, i32, u32 = T.bfloat16, T.float32, T.int32, T.uint32
    num_tokens = T.dynamic("num_tokens")

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
    def body(
        residual,
        x,
        post_mix,
        comb_mix,
        pre_mix,
        fn,
        new_residual,
        collapsed,
        aux,
        partial,
        use_pre,
        write_aux,
    ):
        with T.Kernel(slices, T.ceildiv(num_tokens, block_m), threads=threads) as (split, tile):
            tid = T.get_thread_binding()
            lane = tid % lanes
            row = tid // lanes
            first = tile * block_m
            a_shared = T.alloc_shared((block_m, block_k), bf16)
            b_shared = T.alloc_shared((2 * MIXES, block_k), bf16)
            c_shared = T.alloc_shared((block_m, 2 * MIXES), f32)
            acc = T.alloc_fragment((block_m, 2 * MIXES), f32)

            mix = T.alloc_shared((block_m, mix_size), f32)
            landed = T.alloc_shared(landed_shape, bf16) if async_rows else None
            fn_values = T.alloc_local((fn_passes, 4), f32)
            high = T.alloc_local((4,), bf16)
            low = T.alloc_local((4,), bf16)
            old = T.alloc_local((passes, STREAMS, 8), bf16)
            other = T.alloc_local((passes, 8), bf16)
            # what is stored as one access of 16 bytes; nvcc makes four of a plain store here
            fresh_raw = T.alloc_local((4,), u32)
            out_raw = T.alloc_local((4,), u32)
            fresh = T.view(fresh_raw, (8,), bf16)
            out = T.view(out_raw, (8,), bf16)
            chain = T.alloc_local((8,), f32)
            total = T.alloc_local((8,), f32)
            mean = T.alloc_local((8,), f32)
            squares = T.alloc_local((passes, 2), f32)
            stream_0 = T.alloc_local((8,), bf16)
            weight = T.alloc_local((mix_size,), f32)

            T.clear(acc)
            T.clear(squares)
            T.clear(old)
            T.clear(other)
            land_mix(post_mix, comb_mix, pre_mix, mix, first, tid)
            if async_rows:
                land_rows(residual, x, landed, first, split * blocks * block_h, row, lane)
            T.ptx_commit_group()
            load_fn(fn, fn_values, split * blocks * block_h, tid)
            if not async_rows:
                load_rows(residual, x, old, other, first, split * blocks * block_h, row, lane, use_pre)

            for it in T.serial(blocks):
                column = (split * blocks + it) * block_h
                store_fn(fn_values, b_shared, high, low, tid)
                if it == 0:
                    T.ptx_wait_group(0)
                    T.sync_threads()
                for p in T.unroll(passes):
                    m = p * rows + row
                    token = first + m
                    for q in T.unroll(mix_size // 4):
                        for e in T.vectorized(4):
                            weight[q * 4 + e] = mix[T.min(m, block_m - 1), q * 4 + e]
                    if async_rows:
                        take_rows(landed, old, other, p, T.min(m, block_m - 1), lane)
                    for j in T.unroll(STREAMS):
                        if source == "post":
                            for e in T.unroll(8):
                                chain[e] = weight[j] * T.cast(other[p, e], f32)
                            for i in T.unroll(STREAMS):
                                for e in T.unroll(8):
                                    chain[e] = T.ieee_fmaf(
                                        weight[comb_at + i * STREAMS + j],
                                        T.cast(old[p, i, e], f32),
                                        chain[e],
                                    )
                            for e in T.vectorized(8):
                                fresh[e] = T.cast(chain[e], bf16)
                            if (m < block_m) & (token < num_tokens):
                                T.stg128(new_residual[token, j, column + lane * 8], fresh_raw[0:4])
                        else:
                            for e in T.vectorized(8):
                                fresh[e] = old[p, j, e]
                        if source != "x":
                            if m < block_m:
                                for e in T.vectorized(8):
                                    a_shared[m, j * block_h + lane * 8 + e] = fresh[e]
                            for e in T.unroll(8):
                                squares[p, 0] += T.cast(fresh[e], f32) * T.cast(fresh[e], f32)
                        if j == 0:
                            for e in T.vectorized(8):
                                stream_0[e] = fresh[e]
                            for e in T.unroll(8):
                                total[e] = weight[pre_at] * T.cast(fresh[e], f32)
                                mean[e] = T.cast(fresh[e], f32)
                        else:
                            for e in T.unroll(8):
                                total[e] = T.ieee_fmaf(weight[pre_at + j], T.cast(fresh[e], f32), total[e])
                                mean[e] += T.cast(fresh[e], f32)
                    if source == "x":
                        if m < block_m:
                            for e in T.vectorized(8):
                                a_shared[m, lane * 8 + e] = other[p, e]
                        for e in T.unroll(8):
                            squares[p, 0] += T.cast(other[p, e], f32) * T.cast(other[p, e], f32)
                    for e in T.vectorized(8):
                        out[e] = T.cast(total[e], bf16)
                    if use_pre == 0:
                        for e in T.vectorized(8):
                            out[e] = stream_0[e]
                    for e in T.unroll(8):
                        squares[p, 1] += T.cast(out[e], f32) * T.cast(out[e], f32)
                    if (m < block_m) & (token < num_tokens):
                        T.stg128(collapsed[token, column + lane * 8], out_raw[0:4])
                        if source == "post" and write_aux != 0:
                            for e in T.vectorized(8):
                                out[e] = T.cast(mean[e] * 0.25, bf16)
                            T.stg128(aux[token, column + lane * 8], out_raw[0:4])
                # the next block's loads are under way while this one is multiplied
                if it + 1 < blocks:
                    load_fn(fn, fn_values, column + block_h, tid)
                    load_rows(residual, x, old, other, first, column + block_h, row, lane, use_pre)
                T.gemm(a_shared, b_shared, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

            for p in T.unroll(passes):
                for q in T.unroll(2):
                    for step in T.unroll(lanes.bit_length() - 1):
                        squares[p, q] += T.shfl_xor(squares[p, q], 1 << step)
                m = p * rows + row
                if (lane == 0) & (m < block_m) & (first + m < num_tokens):
                    partial[split, first + m, SQRSUM] = squares[p, 0]
                    partial[split, first + m, COLLAPSED] = squares[p, 1]
            T.copy(acc, c_shared)
            T.sync_threads()
            for p in T.unroll(output_passes):
                m = (p * threads + tid) // 32
                n = (p * threads + tid) % 32
                if (m < block_m) & (n < MIXES) & (first + m < num_tokens):
                    partial[split, first + m, n] = c_shared[m, n] + c_shared[m, n + MIXES]

    stream_shape, row_shape = (num_tokens, STREAMS, hidden), (num_tokens, hidden)

    if source == "post":

        @T.prim_func
        def project_post(
            residual: T.Tensor(stream_shape, bf16),
            x: T.Tensor(row_shape, bf16),
            post_mix: T.Tensor((num_tokens, STREAMS), f32),
            comb_mix: T.Tensor((num_tokens, STREAMS * STREAMS), f32),
            pre_mix: T.Tensor((num_tokens, STREAMS), f32),
            fn: T.Tensor((MIXES, streams, hidden), f32),
            new_residual: T.Tensor(stream_shape, bf16),
            collapsed: T.Tensor(row_shape, bf16),
            aux: T.Tensor(row_shape, bf16),
            partial: T.Tensor((slices, num_tokens, PARTS), f32),
            use_pre: i32,
            write_aux: i32,
        ):
            body(
                residual,
                x,
                post_mix,
                comb_mix,
                pre_mix,
                fn,
                new_residual,
                collapsed,
                aux,
                partial,
                use_pre,
                write_aux,
            )

        return project_post

    if source == "x":

        @T.prim_func
        def project_x(
            residual: T.Tensor(stream_shape, bf16),
            x: T.Tensor(row_shape, bf16),
            pre_mix: T.Tensor((num_tokens, STREAMS), f32),
            fn: T.Tensor((MIXES, streams, hidden), f32),
            collapsed: T.Tensor(row_shape, bf16),
            partial: T.Tensor((slices, num_tokens, PARTS), f32),
            use_pre: i32,
        ):
            body(residual, x, None, None, pre_mix, fn, None, collapsed, None, partial, use_pre, 0)

        return project_x

    @T.prim_func
    def project_residual(
        residual: T.Tensor(stream_shape, bf16),
        pre_mix: T.Tensor((num_tokens, STREAMS), f32),
        fn: T.Tensor((MIXES, streams, hidden), f32),
        collapsed: T.Tensor(row_shape, bf16),
        partial: T.Tensor((slices, num_tokens, PARTS), f32),
        use_pre: i32,
    ):
        body(residual, None, None, None, pre_mix, fn, None, collapsed, None, partial, use_pre, 0)

    return project_residual
