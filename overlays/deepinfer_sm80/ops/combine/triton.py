"""The combine kernel, its launch, and the table of its variants."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..spec import Variant

_POINTERS = ("indices_ptr", "lens_ptr", "topk_ptr", "query_start_ptr", "seq_lens_ptr", "gather_lens_ptr")
_STRIDES = ("indices_stride", "topk_stride")
_SIZES = (
    "width",
    "topk_width",
    "num_tokens",
    "num_reqs",
    "window_size",
    "compress_ratio",
    "topk",
    "M",
    "N",
    "replay_clamp",
)


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES], do_not_specialize_on_alignment=list(_POINTERS))
def _combine_kernel(
    indices_ptr,
    lens_ptr,
    topk_ptr,
    query_start_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    indices_stride: tl.int64,
    topk_stride: tl.int64,
    width: tl.int32,
    topk_width: tl.int32,
    num_tokens: tl.int32,
    num_reqs: tl.int32,
    window_size: tl.int32,
    compress_ratio: tl.int32,
    topk: tl.int32,
    M: tl.int32,
    N: tl.int32,
    replay_clamp: tl.int32,
    COLUMNS: tl.constexpr,
    REQUESTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    token = tl.program_id(0)
    # what `pick` has checked lets a thread load and store ALIGN columns at once
    row_ptr = tl.multiple_of(indices_ptr + token * indices_stride, 4 * ALIGN)
    topk_row_ptr = tl.multiple_of(topk_ptr + token * topk_stride, 4 * ALIGN)
    stored = width // ALIGN * ALIGN
    loaded = tl.where(token < num_tokens, tl.minimum(topk, topk_width), 0) // ALIGN * ALIGN
    # the Top-K row is read whole and a tile ahead: waiting for its length would cost the latency of a load
    column = tl.arange(0, COLUMNS)
    index = tl.load(topk_row_ptr + column, mask=column < loaded, other=-1)

    # the token's request is the number of requests that end at or before it
    base = tl.load(query_start_ptr)
    request = 0
    for first in range(0, num_reqs, REQUESTS):
        other = first + tl.arange(0, REQUESTS)
        end = tl.load(query_start_ptr + 1 + other, mask=other < num_reqs, other=0) - base
        request += tl.sum(((other < num_reqs) & (end <= token)).to(tl.int32), axis=0)
    belongs = (request < num_reqs) & (token < num_tokens)

    query_end = tl.load(query_start_ptr + 1 + request, mask=belongs, other=0) - base
    seq_len = tl.load(seq_lens_ptr + request, mask=belongs, other=0)
    gather_start = seq_len - tl.load(gather_lens_ptr + request, mask=belongs, other=0)
    pos = seq_len - (query_end - token)
    lowest = tl.where(replay_clamp != 0, tl.maximum(gather_start, 0), 0)
    window_start = tl.maximum(pos - window_size + 1, lowest)

    topk_len = tl.where(compress_ratio > 0, (pos + 1) // tl.maximum(compress_ratio, 1), 0)
    topk_len = tl.maximum(tl.minimum(topk_len, topk), 0)
    topk_len = tl.where(belongs, topk_len, 0)
    total = tl.where(belongs, topk_len + tl.maximum(pos - window_start + 1, 0), 0)
    tl.store(lens_ptr + token, total, mask=token < num_tokens)

    window_shift = M * request + N + window_start - gather_start - topk_len
    for _ in range(0, width, COLUMNS):
        chosen = tl.where((index >= 0) & (index < N), index + M * request, -1)
        windowed = tl.where(column < total, column + window_shift, -1)
        tl.store(row_ptr + column, tl.where(column < topk_len, chosen, windowed), mask=column < stored)
        column += COLUMNS
        index = tl.load(topk_row_ptr + column, mask=column < loaded, other=-1)


def _variant(name: str, columns: int, align: int, num_warps: int) -> Variant:
    return Variant(
        name=name,
        kernel=_combine_kernel,
        signature=dict.fromkeys(_POINTERS, "*i32")
        | dict.fromkeys(_STRIDES, "i64")
        | dict.fromkeys(_SIZES, "i32"),
        constexprs={"COLUMNS": columns, "REQUESTS": 32 * num_warps, "ALIGN": align},
        num_warps=num_warps,
    )


# (widest row, variant for rows on 16-byte boundaries, variant for any); wider rows loop in the last
_TABLE = (
    (128, _variant("128-wide", 128, 4, 1), _variant("128-narrow", 128, 1, 1)),
    (1024, _variant("1024-wide", 1024, 4, 2), _variant("1024-narrow", 1024, 1, 4)),
)


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for _, *pair in _TABLE for variant in pair if arch in variant.archs)


def pick(indices: torch.Tensor, topk_indices: torch.Tensor, topk: int) -> Variant:
    """The variant for these tensors' widths, addresses and strides."""
    _, wide, narrow = next((row for row in _TABLE if indices.shape[1] <= row[0]), _TABLE[-1])
    addresses = indices.data_ptr() | topk_indices.data_ptr()
    counts = indices.stride(0) | indices.shape[1] | topk_indices.stride(0) | min(topk, topk_indices.shape[1])
    return wide if (addresses | 4 * counts) % 16 == 0 else narrow


def launch(
    indices: torch.Tensor,
    lens: torch.Tensor,
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    replay_clamp: bool,
) -> None:
    """Launches the kernel on checked arguments, one program per row of `indices`."""
    variant = pick(indices, topk_indices, topk)
    _combine_kernel[(indices.shape[0],)](
        indices,
        lens,
        topk_indices,
        query_start_loc,
        seq_lens,
        gather_lens,
        indices.stride(0),
        topk_indices.stride(0),
        indices.shape[1],
        topk_indices.shape[1],
        topk_indices.shape[0],
        seq_lens.shape[0],
        window_size,
        compress_ratio,
        topk,
        M,
        N,
        int(replay_clamp),
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
