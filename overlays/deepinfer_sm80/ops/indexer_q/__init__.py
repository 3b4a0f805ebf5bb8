"""Rotates and quantizes indexer queries, and folds their scales into the heads' weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128


def indexer_q(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns e4m3 queries and float32 weights: the query that a code stands for times its scale, which is in the weight.

    Elements 64 to 127 of each head are rotated in pairs at the token's position and rounded to bf16 (see `kv_insert`). A
    head's scale is `2^ceil(log2(max(amax, 1e-4) / 448))`, a code e4m3 of `x / 2^e`, nearest even. The weight is
    `weights * scale`, rounded once, times the head's scale, which is exact.

    Args:
        positions: int64 `[tokens]`.
        q: bfloat16 `[tokens, heads, 128]`.
        cos_sin_cache: float32 `[positions, 64]`, 32 cosines, then 32 sines; any row stride.
        weights: bfloat16 `[tokens, heads]`, last dim contiguous.
        scale: factor of every weight, made float32.

    Returns:
        Codes, float8_e4m3fn `[tokens, heads, 128]`, and weights, float32 `[tokens, heads]`, both contiguous.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape or a stride does not fit.

    Notes:
        These are the bytes of stock's CuTeDSL kernel, which vLLM 0.30-0.33 run on newer cards, for finite queries; its Triton
        kernel applies two factors one after the other. Infinities become 0x7f, the code of NaN, with a scale of
        infinity; NaN itself is left out of amax.
    """
    import torch

    from ..rope_quant import ROPE_DIM, check
    from .triton import launch

    check("positions", positions, torch.int64, (None,))
    tokens = positions.shape[0]
    check("q", q, torch.bfloat16, (tokens, None, HEAD_DIM))
    check("cos_sin_cache", cos_sin_cache, torch.float32, (None, ROPE_DIM))
    check("weights", weights, torch.bfloat16, (tokens, q.shape[1]))
    if q.shape[0] != tokens or weights.shape[0] != tokens:
        raise ValueError(
            f"{tokens} positions, but {q.shape[0]} queries and {weights.shape[0]} rows of weights"
        )
    # a pair of elements is read as one word; whatever cannot be read so is copied to where it can
    if (q.data_ptr() | 2 * q.stride(0) | 2 * q.stride(1)) % 4:
        q = q.clone(memory_format=torch.contiguous_format)
    codes = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    folded = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    if folded.numel():
        launch(positions, q, cos_sin_cache, weights, scale, codes, folded)
    return codes.view(torch.float8_e4m3fn), folded
