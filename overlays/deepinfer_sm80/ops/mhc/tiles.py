"""The first kernel of an mHC pre step for many tokens: fn is split once and serves several tiles of tokens."""

# TileLang reads tensor types where Python has annotations
# mypy: disable-error-code="valid-type"

from types import SimpleNamespace
from typing import Any

from . import steps
from .coefficients import MIXES, STREAMS


def make(g: steps.Geometry, slices: int, tiles: int, num_tokens: Any) -> Any:
    """The kernel's body: a CTA takes one slice of `block_h` columns and walks over `tiles` tiles of tokens.

    `project.build`'s own loop reads and splits fn anew for every tile, which at thousands of tokens is more than it
    reads of the residual. Here the slice's part of fn stays in shared memory, and the next tile's rows are on their
    way while one is multiplied. The price is as many slices as there are blocks of columns, whose parts the second
    kernel adds up.
    """
    import tilelang.language as T

    block_m, block_h, block_k, passes, threads = g.block_m, g.block_h, g.block_k, g.passes, g.threads
    bf16, f32, u32 = T.bfloat16, T.float32, T.uint32
    do = steps.make(g, num_tokens)

    # fmt: off
    @T.macro
    def body(residual, x, post_mix, comb_mix, pre_mix, fn, new_residual, collapsed, aux, partial, use_pre, write_aux):
        # fmt: on
        with T.Kernel(slices, T.ceildiv(num_tokens, block_m * tiles), threads=threads) as (split, group):
            T.annotate_min_blocks_per_sm(3 if g.source == "post" else 4)
            tid = T.get_thread_binding()
            lane = tid % g.lanes
            row = tid // g.lanes
            column = split * block_h
            start = group * tiles * block_m
            a_shared = T.alloc_shared((block_m, block_k), bf16)
            b_shared = T.alloc_shared((2 * MIXES, block_k), bf16)
            c_shared = T.alloc_shared((block_m, MIXES), f32)
            mix = T.alloc_shared((block_m, g.mix_size), f32)
            acc = T.alloc_fragment((block_m, 2 * MIXES), f32)
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

            T.clear(old)
            T.clear(other)
            do.land_mix(post_mix, comb_mix, pre_mix, mix, start, tid)
            T.ptx_commit_group()
            do.load_fn(fn, fn_values, column, tid)
            do.load_rows(residual, x, old, other, start, column, row, lane, use_pre)
            do.store_fn(fn_values, b_shared, high, low, tid)

            for it in T.serial(tiles):
                first = start + it * block_m
                T.clear(acc)
                T.clear(squares)
                T.ptx_wait_group(0)
                T.sync_threads()
                do.advance(
                    r, mix, None, a_shared, first, column, tid,
                    new_residual, collapsed, aux, use_pre, write_aux,
                )  # fmt: skip
                T.sync_threads()
                if it + 1 < tiles:
                    do.land_mix(post_mix, comb_mix, pre_mix, mix, first + block_m, tid)
                    T.ptx_commit_group()
                    do.load_rows(residual, x, old, other, first + block_m, column, row, lane, use_pre)
                T.gemm(a_shared, b_shared, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                do.leave_squares(r, partial, split, first, tid)
                # one half after the other: with room for both a CTA would take more than 48 KB
                for m, n in T.Parallel(block_m, 2 * MIXES):
                    if n >= MIXES:
                        c_shared[m, n - MIXES] = acc[m, n]
                T.sync_threads()
                for m, n in T.Parallel(block_m, 2 * MIXES):
                    if n < MIXES:
                        acc[m, n] += c_shared[m, n]
                # in a loop of its own: reading and writing in one puts a barrier into each of its steps
                for m, n in T.Parallel(block_m, 2 * MIXES):
                    if n < MIXES:
                        c_shared[m, n] = acc[m, n]
                T.sync_threads()
                for p in T.unroll(g.output_passes):
                    m = (p * threads + tid) // 32
                    n = (p * threads + tid) % 32
                    if (m < block_m) & (n < MIXES) & (first + m < num_tokens):
                        partial[split, first + m, n] = c_shared[m, n]

    return body
