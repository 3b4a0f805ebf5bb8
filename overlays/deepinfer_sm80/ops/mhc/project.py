"""First kernel of an mHC pre step: one pass over the residual that yields everything that needs all of it.

A CTA takes `block_m` tokens and a slice of the hidden dimension, of all four streams. It makes the new residual (when
fused with post), the collapse, which is ready because its pre-mix comes from the step before, and this slice's part of
the 24 projections and of two sums of squares. The finishing kernel adds the parts up.
"""

# TileLang reads tensor types where Python has annotations
# mypy: disable-error-code="valid-type"

from types import SimpleNamespace
from typing import Any

from . import steps
from . import tiles as several
from .coefficients import MIXES, STREAMS
from .steps import PARTS, Source


# fmt: off
def build(
    hidden: int, source: Source, block_m: int, block_h: int, blocks: int, threads: int, tiles: int = 1,
) -> Any:
    # fmt: on
    """The kernel as a TIR function.

    fn is split into two bf16 terms, which tensor cores multiply at every number of tokens: at 1, 6 and 12 the best
    tiles took 4.1, 4.7 and 4.9 us, the best that multiplied in float32 without tensor cores 4.1, 5.8 and 6.9.

    Args:
        source: what is projected: the residual as it is, another row `x` `[T, hidden]`, or the residual after post.
        block_m, block_h, blocks: tokens, columns at once and column blocks of a CTA.
        tiles: tiles of `block_m` tokens that a CTA walks over, of one block of columns; more than one is another loop.
    """
    import tilelang.language as T

    g = steps.Geometry(source, block_m, block_h, threads)
    streams, block_k, passes = g.streams, g.block_k, g.passes
    slices = hidden // (block_h * blocks)
    # With one block of columns nothing is prefetched. Its rows then travel as asynchronous copies: ptxas would issue
    # plain loads of them only after fn has arrived, and wait for memory twice.
    async_rows = blocks == 1
    landed_shape = block_m, (STREAMS + (source != "residual")) * block_h
    bf16, f32, i32, u32 = T.bfloat16, T.float32, T.int32, T.uint32
    num_tokens = T.dynamic("num_tokens")
    do = steps.make(g, num_tokens)

    # fmt: off
    @T.macro
    def body(residual, x, post_mix, comb_mix, pre_mix, fn, new_residual, collapsed, aux, partial, use_pre, write_aux):
        # fmt: on
        with T.Kernel(slices, T.ceildiv(num_tokens, block_m), threads=threads) as (split, tile):
            tid = T.get_thread_binding()
            lane = tid % g.lanes
            row = tid // g.lanes
            first = tile * block_m
            a_shared = T.alloc_shared((block_m, block_k), bf16)
            b_shared = T.alloc_shared((2 * MIXES, block_k), bf16)
            c_shared = T.alloc_shared((block_m, 2 * MIXES), f32)
            acc = T.alloc_fragment((block_m, 2 * MIXES), f32)

            mix = T.alloc_shared((block_m, g.mix_size), f32)
            landed = T.alloc_shared(landed_shape, bf16) if async_rows else None
            fn_values = T.alloc_local((g.fn_passes, 4), f32)
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
            weight = T.alloc_local((g.mix_size,), f32)
            r = SimpleNamespace(
                old=old, other=other, fresh_raw=fresh_raw, out_raw=out_raw, fresh=fresh, out=out, chain=chain,
                total=total, mean=mean, squares=squares, stream_0=stream_0, weight=weight,
            )  # fmt: skip

            T.clear(acc)
            T.clear(squares)
            T.clear(old)
            T.clear(other)
            do.land_mix(post_mix, comb_mix, pre_mix, mix, first, tid)
            if async_rows:
                do.land_rows(residual, x, landed, first, split * blocks * block_h, row, lane)
            T.ptx_commit_group()
            do.load_fn(fn, fn_values, split * blocks * block_h, tid)
            if not async_rows:
                do.load_rows(residual, x, old, other, first, split * blocks * block_h, row, lane, use_pre)

            for it in T.serial(blocks):
                column = (split * blocks + it) * block_h
                do.store_fn(fn_values, b_shared, high, low, tid)
                if it == 0:
                    T.ptx_wait_group(0)
                    T.sync_threads()
                do.advance(
                    r, mix, landed, a_shared, first, column, tid,
                    new_residual, collapsed, aux, use_pre, write_aux,
                )  # fmt: skip
                # the next block's loads are under way while this one is multiplied
                if it + 1 < blocks:
                    do.load_fn(fn, fn_values, column + block_h, tid)
                    do.load_rows(residual, x, old, other, first, column + block_h, row, lane, use_pre)
                T.gemm(a_shared, b_shared, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

            do.leave_squares(r, partial, split, first, tid)
            T.copy(acc, c_shared)
            T.sync_threads()
            for p in T.unroll(g.output_passes):
                m = (p * threads + tid) // 32
                n = (p * threads + tid) % 32
                if (m < block_m) & (n < MIXES) & (first + m < num_tokens):
                    partial[split, first + m, n] = c_shared[m, n] + c_shared[m, n + MIXES]

    if tiles > 1:
        if blocks != 1:
            raise ValueError(f"several tiles are of one block of columns, not {blocks}")
        body = several.make(g, slices, tiles, num_tokens)
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
            body(residual, x, post_mix, comb_mix, pre_mix, fn, new_residual, collapsed, aux, partial, use_pre, write_aux)  # fmt: skip

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
