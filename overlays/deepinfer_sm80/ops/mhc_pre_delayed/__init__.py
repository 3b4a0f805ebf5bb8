"""mHC pre with a delayed pre-mix: the coefficients of a sublayer from the residual, and the sublayer's input."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..mhc.coefficients import Mixing


# fmt: off
def mhc_pre_delayed(
    residual: torch.Tensor, fn: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor, mixing: Mixing, *,
    pre_mix: torch.Tensor | None = None, x: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None, norm_eps: float = 1e-6,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    # fmt: on
    """Projects the residual to 24 mixes, makes coefficients of them, and collapses the streams with the old pre-mix.

    - `mixes = row @ fn.T`, divided by the row's root mean square `sqrt(sum(row^2) / K + rms_eps)`; the row is all four
      streams, or `x`. On tensor cores for any number of tokens: fn is split into two bf16 terms, which leaves 2^-17 of it.
    - `next_pre = sigmoid(mixes[0:4] * scale[0] + base) + pre_eps`, `post = sigmoid(mixes[4:8] * scale[1] + base) *
      post_factor`.
    - `comb`: softmax over the last index of `mixes[8:24] * scale[2] + base` as `[4, 4]`, plus `sinkhorn_eps`; divided
      by its column sums plus eps, then `iterations - 1` times by row sums plus eps and by column sums plus eps.
    - `layer_input = sum_i pre_mix_i * residual_i` in float32, multiplied and then fused-multiply-added in the order of
      the streams, rounded to bf16; stream 0 without a pre-mix. With a norm weight that bf16 row is RMS-normalised in
      float32 and rounded again.

    A row with a NaN yields NaN coefficients and leaves other rows alone.

    Args:
        residual: `[T, 4, H]` bf16, contiguous, H a multiple of 64.
        fn: `[24, K]` f32, contiguous; K is 4 H, or H with `x`.
        hc_scale, hc_base: `[3]` and `[24]` f32.
        mixing: the five numbers named above.
        pre_mix: `[T, 4]` f32, contiguous, or None.
        x: `[T, H]` bf16, contiguous, projected in place of the residual; or None.
        norm_weight: `[H]` bf16, or None for no normalisation.
        out: the four outputs, to be written to; by default new tensors.

    Returns:
        `post` `[T, 4, 1]` f32, `comb` `[T, 4, 4]` f32, `layer_input` `[T, H]` bf16, `next_pre_mix` `[T, 4]` f32.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or layout.
    """
    from ..mhc import check
    from ..mhc.coefficients import STREAMS
    from ..mhc.tilelang import Weights, launch_pre

    tokens, hidden = check.residual(residual)
    if x is not None:
        check.tensor("x", x, "bfloat16", (tokens, hidden))
    width = hidden if x is not None else STREAMS * hidden
    check.pre_inputs(tokens, hidden, width, fn, hc_scale, hc_base, mixing, pre_mix, norm_weight)
    results, buffers = check.pre_outputs(residual, out)
    if tokens:
        weights = Weights(hc_scale, hc_base, mixing, norm_weight, norm_eps)
        launch_pre(residual, fn, weights, buffers, pre_mix=pre_mix, x=x)
    return results
