"""V4.1's `common/ops/cache_utils.py`: the KV gather and the index combiner that every attention class calls."""

from __future__ import annotations

from typing import Any

from .spec import Binding

MODULE = "models.{layout}.common.ops.cache_utils"
RECORD_BYTES = 584


def _gather(stock):
    """0.30 and 0.31: no hint for the grid."""

    def dequantize_and_gather_k_cache(
        out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, use_fnuz=False
    ):
        from .. import warm
        from ..ops.gather import gather

        warm.first_call("gather")
        _check_record(k_cache, use_fnuz)
        gather(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset)

    return dequantize_and_gather_k_cache


def _gather_with_hint(stock):
    """0.32 and later: `max_gather_len` sizes the grid without reading the GPU."""

    # fmt: off
    def dequantize_and_gather_k_cache(
        out, k_cache, seq_lens, gather_lens, block_table, block_size, offset,
        use_fnuz=False, max_gather_len=None,
    ):
        # fmt: on
        from .. import warm
        from ..ops.gather import gather

        warm.first_call("gather")
        _check_record(k_cache, use_fnuz)
        gather(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, max_gather_len)

    return dequantize_and_gather_k_cache


def _check_record(k_cache: Any, use_fnuz: bool) -> None:
    """Only the 584-byte record exists on SM8x, and its codes are e4m3, not the fnuz kind of some AMD cards."""
    if use_fnuz:
        raise ValueError("use_fnuz=True is an AMD encoding, there is none on an NVIDIA card")
    width = k_cache.shape[-1]
    if width != RECORD_BYTES:
        raise ValueError(f"KV records of {width} bytes are not used on SM8x, only those of {RECORD_BYTES}")


def _combine(stock):
    """0.31 and later."""

    def combine_topk_swa_indices(
        topk_indices,
        query_start_loc,
        seq_lens,
        gather_lens,
        window_size,
        compress_ratio,
        topk,
        M,
        N,
        out=None,
    ):
        from .. import warm
        from ..ops.combine import combine

        warm.first_call("combine")
        args = (topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N)
        return combine(*args, replay_clamp=True, width_cap=False, out=out)

    return combine_topk_swa_indices


def _combine_with_images(stock):
    """0.30, which can also show image tokens to each other.

    A call that uses that goes to stock, whose Triton kernel compiles on SM8x and whose rows are wider by
    `max_image_tokens`. Without images the arguments are None, None and 0, and ours serves.
    """

    # fmt: off
    def combine_topk_swa_indices(
        topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N,
        out=None, left_visible=None, right_visible=None, max_image_tokens=0,
    ):
        # fmt: on
        args = (topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N)
        if left_visible is not None or right_visible is not None or max_image_tokens != 0:
            return stock(*args, out, left_visible, right_visible, max_image_tokens)
        from .. import warm
        from ..ops.combine import combine

        warm.first_call("combine")
        return combine(*args, replay_clamp=False, width_cap=False, out=out)

    return combine_topk_swa_indices


BINDINGS = (
    Binding("dequantize_and_gather_k_cache", "gather", (_gather, _gather_with_hint)),
    Binding("combine_topk_swa_indices", "combine", (_combine, _combine_with_images)),
)
