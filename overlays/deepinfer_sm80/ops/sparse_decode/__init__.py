"""Sparse MLA decode over the paged 584-byte KV records of two caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RECORD_BYTES = 584
HEAD_DIM = 512
ROPE_DIM = 64
# what CUDA allows in the grid dimension that tokens are in
MAX_TOKENS = 65_535


def sparse_decode(
    q: torch.Tensor,
    out: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_indices: torch.Tensor,
    swa_indptr: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    *,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_indptr: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> None:
    """Writes `out[t, h] = sum_i p_i * kv_i` over the valid slots of token t in both caches; a row is key and value at once.

    With `s_i = scale * (q[t, h] . kv_i)`, `p_i = exp(s_i) / (exp(sink[h]) + sum_j exp(s_j))`: one softmax over the rows of
    both caches, with the sink in its denominator only. The slots of token t are `indices[indptr[t]:indptr[t + 1]]` of each
    cache. Slot s is record `s % block_size` of page `s // block_size`; a slot below 0 or past the last page is skipped and
    may stand anywhere. A slot that is listed twice counts twice. A token without a valid slot gets zeros, with a sink too.

    A page and its records are those of `ops.gather`, and so are the values (rounded to bfloat16), except that NaN counts
    as 0: NaN codes, all 64 values under a scale of 255, and NaN in the bfloat16 tail. Values that overflow bfloat16
    are infinite; what a row with one makes of the output is not defined. Products and sums are float32; p is rounded to
    bfloat16 before it meets the values.

    With `positions` the last 64 of the 512 elements are rotated back, from float32 and before the one rounding of the
    output: `(a, b) = (out[448 + 2k], out[449 + 2k])` becomes `(a cos + b sin, b cos - a sin)`, where cos is
    `cos_sin_cache[positions[t], k]` and sin is `cos_sin_cache[positions[t], 32 + k]`. Releases since 0.31 want that; 0.30
    rotates every row itself later, so there positions must be None.

    Args:
        q: bfloat16 `[T, H, 512]`, last dim contiguous, any other strides; H from 1 to 128, T up to 65,535.
        out: bfloat16 `[T, H, 512]`, last dim contiguous, any other strides.
        swa_cache: uint8 `[num_blocks, block_size, 584]`; a page starts every `stride(0)` bytes, which may be any number.
        swa_indices: int32 `[nnz]`.
        swa_indptr: int32 `[>= T + 1]`, not decreasing, within the indices.
        scale: of the scores.
        sink: float32 `[>= H]`, -inf for none; None for no sink at all.
        extra_cache, extra_indices, extra_indptr: the same for the compressed cache, with its own block size and strides;
            all None where there is none.
        positions: int64 `[>= T]`, or None.
        cos_sin_cache: float32 `[max position, 64]`, any row stride; needed with positions.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape or a stride does not fit, or arguments that belong together are not all given.

    Notes:
        Lists are read on the device only: the launch is chosen from T, H, the SM count and whether there is an extra cache.
        With several splits per token the partial results go through scratch memory allocated by the call, float32
        `[T, splits, H, 512]` and two `[T, splits, H]`.
        Where stock vLLM gives another result: see `ops.gather` for scales 0 and 255 (255: infinite there).
    """
    from .. import check
    from .triton import launch

    tokens, _heads = check.attention(q, out, sink, HEAD_DIM)
    if tokens > MAX_TOKENS:
        raise ValueError(f"q must have at most {MAX_TOKENS} tokens, has {tokens}: one launch takes no more")
    lists = [_checked_list("swa", swa_cache, swa_indices, swa_indptr, tokens)]
    extra = (extra_cache, extra_indices, extra_indptr)
    if any(tensor is not None for tensor in extra):
        lists.append(_checked_list("extra", *extra, tokens))
    if positions is not None:
        if cos_sin_cache is None:
            raise ValueError("positions need a cos_sin_cache")
        check.tensor("positions", positions, "int64", (None,), fewest=tokens)
        check.tensor("cos_sin_cache", cos_sin_cache, "float32", (None, ROPE_DIM))
    if tokens:
        launch(q, out, lists, float(scale), sink, positions, cos_sin_cache)


def _checked_list(
    name: str,
    cache: torch.Tensor | None,
    indices: torch.Tensor | None,
    indptr: torch.Tensor | None,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .. import check

    if cache is None or indices is None or indptr is None:
        raise ValueError(f"{name}_cache, {name}_indices and {name}_indptr belong together")
    check.tensor(f"{name}_cache", cache, "uint8", (None, None, RECORD_BYTES))
    check.tensor(f"{name}_indices", indices, "int32", (None,))
    check.tensor(f"{name}_indptr", indptr, "int32", (None,), fewest=tokens + 1)
    return cache, indices, indptr
