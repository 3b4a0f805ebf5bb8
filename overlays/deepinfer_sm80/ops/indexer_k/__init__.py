"""Normalizes, rotates and quantizes indexer keys into their paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RECORD_BYTES = 132
HEAD_DIM = 128


def indexer_k(
    k_pre: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """Writes the key of every token t that ends a group, `(positions[t] + 1) % compress_ratio == 0`, and has a slot >= 0.

    A page is `block_size` rows of 128 e4m3 codes followed by `block_size` float32 scales; slot s is row `s % block_size` of
    page `s // block_size`. Of a key k, in float32 with a rounding after every step:

    - `r = 1 / sqrt(mean(k^2) + norm_eps)`, the mean rounded once (its sum is exact), the root correctly rounded;
    - `n = bf16(k * r * norm_weight)`, from left to right;
    - elements 64 to 127 rotated in pairs at position `p // ratio * ratio`, rounded to bf16 (see `kv_insert`); elements 0 to 63
      "rotated" by cos 1 and sin 0, as stock does it: that changes no value, but may change the sign of a zero;
    - scale `2^ceil(log2(max(amax, 1e-4) / 448))`, stored as float32; code = e4m3 of `n / scale`, nearest even.

    Args:
        k_pre: bfloat16 `[>= tokens, 128]`, last dim contiguous; only rows of written keys are read.
        positions: int64 `[>= tokens]`.
        cos_sin_cache: float32 `[positions, 64]`, 32 cosines, then 32 sines; any row stride.
        norm_weight: bfloat16 `[128]`.
        norm_eps: at least 2^-126.
        k_cache: uint8 `[num_blocks, block_size, 132]`; a page starts every `stride(0)` bytes, a multiple of 4.
        slot_mapping: int64 `[tokens]`; -1 skips a token. Two tokens must not share a slot.
        compress_ratio: tokens in a group.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a stride, an address, the ratio or epsilon does not fit.

    Notes:
        Stock's own sum of squares and reciprocal root may be a few float32 steps off, in a direction that depends on how
        Triton distributes the sum; now and then a bf16 value rounds the other way, and then perhaps a code. All else is
        equal, byte for byte, except where squares overflow float32 (keys of 1e18: all zero there) and for NaN and
        infinities, which become 0x7f here.
    """
    import torch

    from ..rope_quant import check, check_pages, check_writer
    from .triton import launch

    tokens = check_writer(positions, cos_sin_cache, slot_mapping, compress_ratio)
    check("k_pre", k_pre, torch.bfloat16, (tokens, HEAD_DIM))
    check("norm_weight", norm_weight, torch.bfloat16, (HEAD_DIM,))
    check_pages("k_cache", k_cache, RECORD_BYTES, 4)
    if not norm_eps >= 2.0**-126:
        raise ValueError(f"norm_eps must be at least 2^-126, is {norm_eps}")
    if tokens == 0:
        return
    launch(k_pre, positions, cos_sin_cache, norm_weight, norm_eps, k_cache, slot_mapping, compress_ratio)
