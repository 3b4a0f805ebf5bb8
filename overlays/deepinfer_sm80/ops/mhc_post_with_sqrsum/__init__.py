"""mHC post that also yields the sum of squares of each new row: what a projection by itself needs beside its mixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def mhc_post_with_sqrsum(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mhc_post`, exactly, and the raw sum of squares of each token's new streams.

    The squares are those of the bf16 values; the sum is no mean. Nothing calls it yet: no release of vLLM has a place
    for it, and our own fused step makes the sum while it projects. It is for a post step whose projection is elsewhere,
    such as a GEMM of its own. The sum is exact to
    2^-38 of itself before it is rounded, once, to float32: it is within 2^-24 of itself of the true sum, which is less
    than 1e-3 up to 2^15 (unit-scale rows of 5,120 columns: about 20,480).

    Args:
        x, residual, post_layer_mix, comb_res_mix: as for `mhc_post`; H a multiple of 8, at most 8,192 (measured: 5,120).
        out: `(new residual, sums)` to write to; by default new tensors.

    Returns:
        `[T, 4, H]` bf16 and `[T]` f32.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or layout, or H is above 8,192.
    """
    import torch

    from ..mhc import check
    from ..mhc.tilelang import launch_post

    post_mix, comb_mix = check.post_inputs(x, residual, post_layer_mix, comb_res_mix)
    if out is None:
        out = torch.empty_like(residual), residual.new_empty(residual.shape[:1], dtype=torch.float32)
    new, sums = out
    check.tensor("out[0]", new, "bfloat16", tuple(residual.shape))
    check.tensor("out[1]", sums, "float32", (residual.shape[0],))
    if residual.shape[0]:
        launch_post(x, residual, post_mix, comb_mix, new, sums)
    return out
