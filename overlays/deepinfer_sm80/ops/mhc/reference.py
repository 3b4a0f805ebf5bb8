"""Oracles of the mHC ops, plain PyTorch.

Projection and coefficients are float64 throughout. What ends as bf16 and feeds something else is rounded where the
contract says so, in float32 arithmetic of a stated order, so that a kernel can do exactly the same: a sum that
cancels would otherwise be any number of bf16 steps away from its float64 value.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gather.reference import round_to_bf16
from .coefficients import STREAMS, Mixing


def post(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """New residual streams: `new_j = post_j * x + sum_i comb[i, j] * residual_i`, rounded to bf16.

    Order: `post_j * x` rounded to float32, then one float32 fused multiply-add for each i = 0, 1, 2, 3.

    Args:
        x: `[T, H]` bf16, the sublayer's output.
        residual: `[T, 4, H]` bf16.
        post_layer_mix: `[T, 4, 1]` or `[T, 4]` f32.
        comb_res_mix: `[T, 4, 4]` f32, first index the old stream.
    """
    streams = [residual[:, i].float() for i in range(STREAMS)]
    mixed = []
    for j in range(STREAMS):
        total = post_layer_mix.reshape(-1, STREAMS)[:, j, None] * x.float()
        for i, stream in enumerate(streams):
            total = fma(comb_res_mix[:, i, j, None], stream, total)
        mixed.append(total.bfloat16())
    return torch.stack(mixed, dim=1)


def project(x: torch.Tensor, fn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw mixes `x @ fn.T` and raw sum of squares of each row, float64: `[T, 24]` and `[T]`.

    Args:
        x: `[T, K]` bf16.
        fn: `[24, K]` f32.
    """
    x = x.double()
    return x @ fn.double().T, x.square().sum(1)


def coefficients(
    mixes: torch.Tensor,
    sqrsum: torch.Tensor,
    numel: int,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    mixing: Mixing,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pre-mix `[T, 4]`, post-mix `[T, 4]` and residual mix `[T, 4, 4]` of raw mixes, float64.

    The mixes are divided by the row's root mean square, scaled and shifted. Pre is a sigmoid plus its eps, post a
    sigmoid times its factor. The residual mix is a softmax over its last index plus eps, then normalised by columns,
    and `iterations - 1` times more by rows and by columns; each sum gets eps.
    """
    logits = mixes * torch.rsqrt(sqrsum / numel + mixing.rms_eps)[:, None]
    scale, base, eps = hc_scale.double(), hc_base.double(), mixing.sinkhorn_eps
    pre = torch.sigmoid(logits[:, :4] * scale[0] + base[:4]) + mixing.pre_eps
    after = torch.sigmoid(logits[:, 4:8] * scale[1] + base[4:8]) * mixing.post_factor
    comb = torch.softmax((logits[:, 8:] * scale[2] + base[8:]).reshape(-1, STREAMS, STREAMS), dim=-1)
    comb = comb + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(mixing.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, after, comb


def collapse(residual: torch.Tensor, pre_mix: torch.Tensor | None) -> torch.Tensor:
    """The streams' weighted sum `[T, H]`, rounded to bf16; stream 0 without a pre-mix.

    Order: `pre_0 * residual_0` rounded to float32, then one float32 fused multiply-add for each i = 1, 2, 3.
    """
    if pre_mix is None:
        return residual[:, 0].clone()
    total = pre_mix[:, 0, None] * residual[:, 0].float()
    for i in range(1, STREAMS):
        total = fma(pre_mix[:, i, None], residual[:, i].float(), total)
    return total.bfloat16()


def normalize(collapsed: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm of bf16 rows in float64, rounded once to bf16; without a weight the rows as they are."""
    if weight is None:
        return collapsed
    rows = collapsed.double()
    scale = torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)
    return round_to_bf16(rows * scale * weight.double())


def stream_mean(residual: torch.Tensor) -> torch.Tensor:
    """Mean over the streams `[T, H]` bf16: float32 sums in the order of the streams, a quarter of them, rounded."""
    total = residual[:, 0].float()
    for i in range(1, STREAMS):
        total = total + residual[:, i].float()
    return (total * 0.25).bfloat16()


# fmt: off
def pre_delayed(
    residual: torch.Tensor, fn: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor, mixing: Mixing, *,
    pre_mix: torch.Tensor | None = None, x: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None, norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    # fmt: on
    """`(post [T, 4, 1], comb [T, 4, 4], layer_input [T, H] bf16, next_pre_mix [T, 4])`; coefficients float64.

    The projection reads `x`, or all streams of the residual; the collapse uses the pre-mix that is passed in.
    """
    rows = residual.flatten(1) if x is None else x
    mixes, sqrsum = project(rows, fn)
    pre, after, comb = coefficients(mixes, sqrsum, rows.shape[1], hc_scale, hc_base, mixing)
    return after[:, :, None], comb, normalize(collapse(residual, pre_mix), norm_weight, norm_eps), pre


def fused_post_pre_delayed(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    *args: Any,
    capture_aux: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    """`post`, then `pre_delayed` of its bf16 result: `(residual_new, post, comb, layer_input, next_pre_mix, aux)`.

    `args` and `kwargs` are those of `pre_delayed` from `fn` on, without `x`; `aux` is the mean of the new streams, and
    has no rows unless it is asked for.
    """
    new = post(x, residual, post_layer_mix, comb_res_mix)
    outputs = pre_delayed(new, *args, **kwargs)
    return new, *outputs, stream_mean(new if capture_aux else new[:0])


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """float32 `a * b + c`, rounded once; `b` must have at most 29 significant bits, as bf16 values do."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # the part that float64 lost, by Knuth's two-sum
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    return _odd(total, lost, torch.int64).float()


def _odd(rounded: torch.Tensor, lost: torch.Tensor, bits: torch.dtype) -> torch.Tensor:
    """`rounded` made odd in its last bit where something was lost, so that rounding it again is rounding once."""
    whole = rounded.contiguous().view(bits)
    even = (whole & 1 == 0) & (lost != 0) & (rounded != 0) & rounded.isfinite()
    # one step towards what was lost: away from zero if it has the sign of the value
    step = torch.where((lost > 0) == (rounded > 0), 1, -1).to(bits)
    return torch.where(even, whole + step, whole).view(rounded.dtype)
