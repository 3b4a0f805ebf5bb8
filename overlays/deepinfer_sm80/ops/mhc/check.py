"""Argument checks that the mHC ops share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..check import tensor as _tensor
from .coefficients import COMB, MIXES, STREAMS, Mixing

if TYPE_CHECKING:
    import torch

    from .tilelang import Outputs

# what one load of a thread covers; a row must be made of whole ones
COLUMNS = 8

# name, tensor, dtype and the shapes it may have
tensor = partial(_tensor, whole=True)


def residual(given: torch.Tensor) -> tuple[int, int]:
    """Tokens and hidden size of a residual.

    Raises:
        TypeError, ValueError: it is no contiguous `[T, 4, H]` bf16 with H a multiple of 8.
    """
    tensor("residual", given, "bfloat16", (None, STREAMS, None))
    tokens, _, hidden = given.shape
    if hidden % COLUMNS or not hidden:
        raise ValueError(f"residual's hidden size must be a multiple of {COLUMNS}, is {hidden}")
    return tokens, hidden


def post_inputs(
    x: torch.Tensor, streams: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks what post takes; returns the mixes as `[T, 4]` and `[T, 16]`."""
    tokens, hidden = residual(streams)
    tensor("x", x, "bfloat16", (tokens, hidden))
    tensor("post_layer_mix", post_layer_mix, "float32", (tokens, STREAMS, 1), (tokens, STREAMS))
    tensor("comb_res_mix", comb_res_mix, "float32", (tokens, STREAMS, STREAMS))
    return post_layer_mix.view(tokens, STREAMS), comb_res_mix.view(tokens, COMB)


def pre_inputs(
    tokens: int,
    hidden: int,
    projected: int,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    mixing: Mixing,
    pre_mix: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> None:
    """Checks what a pre step takes beside the residual; `projected` is the width of the rows that are projected."""
    tensor("fn", fn, "float32", (MIXES, projected))
    tensor("hc_scale", hc_scale, "float32", (3,))
    tensor("hc_base", hc_base, "float32", (MIXES,))
    if mixing.iterations < 1:
        raise ValueError(f"mixing must have 1 iteration or more, has {mixing.iterations}")
    if pre_mix is not None:
        tensor("pre_mix", pre_mix, "float32", (tokens, STREAMS))
    if norm_weight is not None:
        tensor("norm_weight", norm_weight, "bfloat16", (hidden,))


def pre_outputs(
    streams: torch.Tensor, out: tuple[torch.Tensor, ...] | None
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Outputs]:
    """The outputs of a pre step as the caller sees them and as the kernels do, from `out` or new."""
    import torch

    from .tilelang import Outputs

    tokens, _, hidden = streams.shape
    if out is None:
        float32 = {"dtype": torch.float32, "device": streams.device}
        out = (
            torch.empty((tokens, STREAMS, 1), **float32),
            torch.empty((tokens, STREAMS, STREAMS), **float32),
            streams.new_empty((tokens, hidden)),
            torch.empty((tokens, STREAMS), **float32),
        )
    post, comb, layer_input, next_pre = out
    tensor("out[0]", post, "float32", (tokens, STREAMS, 1))
    tensor("out[1]", comb, "float32", (tokens, STREAMS, STREAMS))
    tensor("out[2]", layer_input, "bfloat16", (tokens, hidden))
    tensor("out[3]", next_pre, "float32", (tokens, STREAMS))
    flat = Outputs(post.view(tokens, STREAMS), comb.view(tokens, COMB), layer_input, next_pre)
    return (post, comb, layer_input, next_pre), flat
