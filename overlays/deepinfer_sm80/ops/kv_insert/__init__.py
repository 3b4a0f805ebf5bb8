"""Rotates and quantizes compressed KV states into the 584-byte records of a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RECORD_BYTES = 584
HEAD_DIM = 512


def kv_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """Writes the record of every token t that ends a group, `(positions[t] + 1) % compress_ratio == 0`, and has a slot >= 0.

    A page is `block_size` data rows of 576 bytes followed by `block_size` scale rows of 8 bytes; slot s is row
    `s % block_size` of page `s // block_size`. Of a state's 512 elements the first 448 are quantized in groups of 64:
    scale `2^e`, `e = ceil(log2(max(amax, 1e-4) / 448))`, stored as the byte `e + 127`; code = e4m3 of `x / 2^e`, nearest
    even. The last 64 are rotated in pairs, from the unquantized bf16, at position `p // ratio * ratio`, and rounded once to
    bf16: `even * cos - odd * sin` and `odd * cos + even * sin`, each with its second product rounded to float32 and
    the first one not. The eighth scale byte is 0.

    Args:
        latent: bfloat16 `[>= tokens, 512]`, contiguous; only rows of written records are read.
        positions: int64 `[>= tokens]`.
        cos_sin_cache: float32 `[positions, 64]`, 32 cosines, then 32 sines; any row stride.
        kv_cache: uint8 `[num_blocks, block_size, 584]`; a page starts every `stride(0)` bytes, an even number.
        slot_mapping: int64 `[tokens]`; -1 skips a token. Two tokens must not share a slot.
        compress_ratio: tokens in a group.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a stride, an address or the ratio does not fit.

    Notes:
        These are the bytes that stock vLLM 0.30-0.33 writes on newer cards for every finite state. A NaN in the first
        448 elements is left out of amax, as there, and becomes 0x7f; stock's clamp gives 0x7e or 0xfe. A group with an
        infinity gets scale 255, as there, zeros for its finite elements and 0x7f for the others.
    """
    import torch

    from ..rope_quant import check, check_pages, check_writer
    from .triton import launch

    tokens = check_writer(positions, cos_sin_cache, slot_mapping, compress_ratio)
    check("latent", latent, torch.bfloat16, (tokens, HEAD_DIM))
    if not latent.is_contiguous():
        raise ValueError(f"latent must be contiguous, its strides are {latent.stride()}")
    check_pages("kv_cache", kv_cache, RECORD_BYTES, 2)
    if tokens == 0:
        return
    launch(latent, positions, cos_sin_cache, kv_cache, slot_mapping, compress_ratio)
