"""The decode logits kernel, its launch, and the table of its variants."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import gate
from ..indexer.decode import plane, score
from ..spec import Variant

_POINTERS = {"q_ptr": "*i32", "cache_ptr": "*i32", "weights_ptr": "*fp32"}
_POINTERS |= {"lens_ptr": "*i32", "table_ptr": "*i32", "out_ptr": "*fp32"}
_STRIDES = (
    "q_stride_request",
    "q_stride_token",
    "q_stride_head",
    "page_stride",
    "weights_stride",
    "lens_stride_request",
    "lens_stride_token",
    "table_stride",
    "out_stride",
)
_SIZES = ("next_n", "lens_step", "block_size", "limit", "splits")


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES], do_not_specialize_on_alignment=list(_POINTERS))
def _indexer_decode_kernel(
    q_ptr,
    cache_ptr,
    weights_ptr,
    lens_ptr,
    table_ptr,
    out_ptr,
    q_stride_request: tl.int64,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    page_stride: tl.int64,
    weights_stride: tl.int64,
    lens_stride_request: tl.int64,
    lens_stride_token: tl.int64,
    table_stride: tl.int64,
    out_stride: tl.int64,
    next_n: tl.int32,
    lens_step: tl.int32,
    block_size: tl.int32,
    limit: tl.int32,
    splits: tl.int32,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    LOAD_BYTES: tl.constexpr,
):
    row0 = tl.program_id(0) * TOKENS
    request, token0 = (row0 // next_n).to(tl.int64), row0 % next_n
    token = token0 + tl.arange(0, TOKENS)
    length = tl.load(lens_ptr + request * lens_stride_request + token * lens_stride_token)
    # where there is one length for all tokens of a request it is the last one's
    length = tl.minimum(tl.maximum(length, 0) - lens_step * (next_n - 1 - token), limit)
    longest = tl.max(length)
    tiles_per_page = tl.cdiv(block_size, KEYS)
    tiles = tl.cdiv(tl.maximum(longest, 0), block_size) * tiles_per_page
    table_ptr += request * table_stride

    # 16 rows of every token, then the other 16: the rows that one warp's dot holds are one token's heads
    row = tl.arange(0, 32 * TOKENS)
    head = row // (16 * TOKENS) * 16 + row % 16
    row_token = token0 + row // 16 % TOKENS
    q_row_ptr = q_ptr + request * q_stride_request + row_token * q_stride_token + head * q_stride_head
    q_row_ptr = tl.multiple_of(q_row_ptr, LOAD_BYTES)
    q = tl.load(q_row_ptr[:, None] + tl.arange(0, 32)[None, :])
    weight = tl.load(weights_ptr + (row0 + row // 16 % TOKENS).to(tl.int64) * weights_stride + head)
    q0, q1, q2, q3 = plane(q, 0), plane(q, 1), plane(q, 2), plane(q, 3)

    slot = tl.arange(0, KEYS)
    out_row_ptr = out_ptr + (row0 + tl.arange(0, TOKENS)).to(tl.int64) * out_stride
    first = tl.program_id(1)
    page = _page(table_ptr, first, tiles, tiles_per_page)
    k, scale = _load_tile(
        cache_ptr, page * page_stride, first, tiles, tiles_per_page, block_size, longest, KEYS, LOAD_BYTES
    )
    page = _page(table_ptr, first + splits, tiles, tiles_per_page)
    for tile in range(first, tiles, splits):
        k0, k1, k2, k3 = plane(k, 0), plane(k, 1), plane(k, 2), plane(k, 3)
        k_scale = scale
        # the next tile, and the page of the one after it, are on their way while this one is multiplied
        k, scale = _load_tile(
            cache_ptr,
            page * page_stride,
            tile + splits,
            tiles,
            tiles_per_page,
            block_size,
            longest,
            KEYS,
            LOAD_BYTES,
        )
        page = _page(table_ptr, tile + 2 * splits, tiles, tiles_per_page)
        result = score(q0, q1, q2, q3, k0, k1, k2, k3, k_scale, weight, TOKENS, KEYS)
        slots = tile % tiles_per_page * KEYS + slot
        position = tile // tiles_per_page * block_size + slots
        wanted = (slots < block_size)[None, :] & (position[None, :] < length[:, None])
        tl.store(out_row_ptr[:, None] + position[None, :], result, mask=wanted)


@triton.jit
def _page(table_ptr, tile, tiles, tiles_per_page):
    return tl.load(table_ptr + tile // tiles_per_page, mask=tile < tiles, other=0).to(tl.int64)


@triton.jit
def _load_tile(
    cache_ptr,
    page_start,
    tile,
    tiles,
    tiles_per_page,
    block_size,
    longest,
    KEYS: tl.constexpr,
    LOAD_BYTES: tl.constexpr,
):
    slots = tile % tiles_per_page * KEYS + tl.arange(0, KEYS)
    position = tile // tiles_per_page * block_size + slots
    # `position` alone is no guard: after the last tile it may be anything
    valid = (slots < block_size) & (position < longest) & (tile < tiles)
    k_row_ptr = tl.multiple_of(cache_ptr + page_start + slots * 32, LOAD_BYTES)
    k = tl.load(k_row_ptr[:, None] + tl.arange(0, 32)[None, :], mask=valid[:, None], other=0)
    scale = tl.load(cache_ptr + page_start + (block_size * 32 + slots), mask=valid, other=0)
    return k, scale.to(tl.float32, bitcast=True)


def _variant(name: str, tokens: int, keys: int, num_warps: int) -> Variant:
    return Variant(
        name=name,
        kernel=_indexer_decode_kernel,
        signature=_POINTERS | dict.fromkeys(_STRIDES, "i64") | dict.fromkeys(_SIZES, "i32"),
        constexprs={"TOKENS": tokens, "KEYS": keys, "LOAD_BYTES": 16},
        num_warps=num_warps,
        num_stages=1,
        expects_mma=True,
    )


# two tokens of one request share the decoded keys; more come from vLLM as requests of one token each
ONE = _variant("1x64", 1, 64, 2)
TWO = _variant("2x64", 2, 64, 2)

# programs per SM that the grid is made for; each takes tile after tile
PROGRAMS_PER_SM = 8


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in (ONE, TWO) if arch in variant.archs)


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launches the kernel on checked arguments (`q` and `kv_cache` as int32 words); nothing is read from the GPU."""
    requests, next_n = q.shape[:2]
    variant = ONE if next_n % 2 else TWO
    programs = requests * next_n // variant.constexprs["TOKENS"]
    block_size, keys = kv_cache.shape[1], variant.constexprs["KEYS"]
    limit = min(out.shape[1], block_table.shape[1] * block_size)
    tiles = -(-limit // block_size) * -(-block_size // keys)
    splits = max(1, min(tiles, -(-PROGRAMS_PER_SM * _sm_count() // programs)))
    lens = context_lens if context_lens.dim() == 2 else context_lens[:, None]
    per_token = lens.shape[1] == next_n
    _indexer_decode_kernel[(programs, splits)](
        q,
        kv_cache,
        weights,
        lens,
        block_table,
        out,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        kv_cache.stride(0),
        weights.stride(0),
        lens.stride(0),
        lens.stride(1) if per_token else 0,
        block_table.stride(0),
        out.stride(0),
        next_n,
        0 if per_token else 1,
        block_size,
        limit,
        splits,
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )


def _sm_count() -> int:
    device = gate.device()
    return device.sm_count if device else gate.SM_COUNTS["sm80"]
