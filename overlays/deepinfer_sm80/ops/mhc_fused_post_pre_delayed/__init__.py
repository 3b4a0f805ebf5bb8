"""mHC post of one sublayer and the delayed pre of the next, in one pass over the residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..mhc.coefficients import Mixing


# fmt: off
def mhc_fused_post_pre_delayed(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor,
    fn: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor, mixing: Mixing, *,
    pre_mix: torch.Tensor | None = None, norm_weight: torch.Tensor | None = None, norm_eps: float = 1e-6,
    capture_aux: bool = False,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    # fmt: on
    """`mhc_post`, then `mhc_pre_delayed` of its result, as those two ops define them.

    The projection reads the new residual as it is written, rounded to bf16, for any number of tokens. (vLLM projects
    the unrounded float32 values up to 32 tokens and the rounded ones beyond: a seam that this op does not have.)

    Args:
        x, residual, post_layer_mix, comb_res_mix: of `mhc_post`.
        fn, hc_scale, hc_base, mixing, pre_mix, norm_weight, norm_eps: of `mhc_pre_delayed`.
        capture_aux: also return the mean of the new streams: float32 sums in their order, a quarter of them as bf16.
        out: the six outputs, to be written to; by default new tensors.

    Returns:
        `residual_new` `[T, 4, H]` bf16, `post` `[T, 4, 1]` f32, `comb` `[T, 4, 4]` f32, `layer_input` `[T, H]` bf16,
        `next_pre_mix` `[T, 4]` f32, `aux` `[T, H]` bf16, or `[0, H]` without `capture_aux`.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or layout.
    """
    import torch

    from ..mhc import check
    from ..mhc.coefficients import STREAMS
    from ..mhc.tilelang import Weights, launch_fused

    post_mix, comb_mix = check.post_inputs(x, residual, post_layer_mix, comb_res_mix)
    tokens, hidden = check.residual(residual)
    check.pre_inputs(
        tokens, hidden, STREAMS * hidden, fn, hc_scale, hc_base, mixing, pre_mix, norm_weight
    )
    new = torch.empty_like(residual) if out is None else out[0]
    aux = x.new_empty((tokens if capture_aux else 0, hidden)) if out is None else out[5]
    check.tensor("out[0]", new, "bfloat16", tuple(residual.shape))
    check.tensor("out[5]", aux, "bfloat16", (tokens if capture_aux else 0, hidden))
    results, buffers = check.pre_outputs(residual, None if out is None else out[1:5])
    if tokens:
        weights = Weights(hc_scale, hc_base, mixing, norm_weight, norm_eps)
        step = x, residual, post_mix, comb_mix
        launch_fused(step, fn, weights, new, buffers, pre_mix=pre_mix, aux=aux if capture_aux else None)
    return new, *results, aux
