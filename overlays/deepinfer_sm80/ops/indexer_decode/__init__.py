"""Indexer logits of decode: a few query tokens per request against the request's paged keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..indexer import HEADS, RECORD_BYTES
from ..indexer.arguments import ALIGNMENT, check, check_heads, words

if TYPE_CHECKING:
    import torch


def indexer_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes `sum_h relu(q[b, n, h] . k[i]) * weights[b * next_n + n, h] * k_scale[i]` to column i of row `b * next_n + n`.

    A page holds `block_size * 128` e4m3 codes, then `block_size` float32 scales. Arithmetic and weights are those of
    `indexer_prefill`.

    Args:
        q: e4m3 codes `[B, next_n, 32, 128]` (float8_e4m3fn or uint8), address and strides multiples of 16 bytes.
        kv_cache: uint8 `[pages, block_size, 132]`; a page starts every `stride(0)` bytes (a multiple of 16), whatever lies
            between two of them, and is contiguous.
        weights: float32 `[>= B * next_n, 32]`, any row stride.
        context_lens: int32, how many keys a token sees: `[>= B, next_n]`; or `[>= B]` or `[>= B, 1]`, the last token's, of
            which each token before sees one less. Read on the GPU; nothing is launched or allocated by it.
        block_table: int32 `[>= B, pages of a request]`, any row stride; entries that are read must be valid page numbers.
        out: float32 `[>= B * next_n, W]`, any row stride. Columns from a row's length on, W at most, are left as they are: stock
            leaves them undefined too, and top-k and candidate kernels read none of them.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a stride or an address does not fit.

    Notes:
        Memory: `out` is all there is; its width is the longest context that the model serves, in states, so it grows with the
        batch only.
        NaN: the codes 0x7f and 0xff count as 480 and -480; a NaN in `weights` or a scale makes its logits NaN. What lies in
        slots from the context's length on is never read.
    """
    import torch

    from .triton import launch

    check_heads(q, 4)
    requests, next_n = q.shape[:2]
    check("weights", weights, torch.float32, (requests * next_n, HEADS))
    check("block_table", block_table, torch.int32, (requests, None))
    check("out", out, torch.float32, (requests * next_n, None))
    check("kv_cache", kv_cache, torch.uint8, (None, None, RECORD_BYTES))
    _check_lens(context_lens, requests, next_n)
    if requests * next_n == 0 or block_table.shape[1] == 0 or out.shape[1] == 0 or kv_cache.shape[1] == 0:
        return
    launch(words("q", q), _page_words(kv_cache), weights, context_lens, block_table, out)


def _check_lens(context_lens: torch.Tensor, requests: int, next_n: int) -> None:
    import torch

    if context_lens.dtype != torch.int32:
        raise TypeError(f"context_lens must be torch.int32, is {context_lens.dtype}")
    shape = tuple(context_lens.shape)
    if shape[0] < requests or not (len(shape) == 1 or (len(shape) == 2 and shape[1] in (1, next_n))):
        raise ValueError(
            f"context_lens must have shape ({requests},) or ({requests}, 1 or {next_n}), has {shape}"
        )


def _page_words(kv_cache: torch.Tensor) -> torch.Tensor:
    """The cache as int32 words, shape and page stride as they are in words."""
    import torch

    _pages, block_size, width = kv_cache.shape
    contiguous = block_size == 1 or kv_cache.stride(1) == width
    if not contiguous or kv_cache.stride(0) % ALIGNMENT or kv_cache.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"kv_cache must have contiguous pages, an address and a page stride that are multiples of {ALIGNMENT} bytes, has "
            f"strides {kv_cache.stride()} at {kv_cache.data_ptr():#x}"
        )
    return kv_cache.view(torch.int32)
