"""mHC post: a sublayer's output and the residual streams make the new residual streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """New residual streams, `new_j = post_j * x + sum_i comb[i, j] * residual_i`, rounded to bf16.

    Exactly, for any number of tokens: `post_j * x` is rounded to float32, then come four float32 fused multiply-adds
    in the order i = 0, 1, 2, 3, then one rounding to bf16 (nearest, ties to even).

    Args:
        x: `[T, H]` bf16, contiguous, H a multiple of 8.
        residual: `[T, 4, H]` bf16, contiguous.
        post_layer_mix: `[T, 4, 1]` or `[T, 4]` f32, contiguous.
        comb_res_mix: `[T, 4, 4]` f32, contiguous; the first index is the old stream.
        out: where to write; by default a new tensor.

    Returns:
        `[T, 4, H]` bf16.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or layout.
    """
    import torch

    from ..mhc import check
    from ..mhc.tilelang import launch_post

    post_mix, comb_mix = check.post_inputs(x, residual, post_layer_mix, comb_res_mix)
    if out is None:
        out = torch.empty_like(residual)
    check.tensor("out", out, "bfloat16", tuple(residual.shape))
    if residual.shape[0]:
        launch_post(x, residual, post_mix, comb_mix, out)
    return out
