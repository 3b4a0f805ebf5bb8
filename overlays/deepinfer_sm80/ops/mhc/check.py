"""Argument checks that the mHC ops share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .tilelang import Outputs

STREAMS = 4
MIXES = STREAMS * (STREAMS + 2)
# what one load of a thread covers; a row must be made of whole ones
COLUMNS = 8


def residual(tensor: torch.Tensor) -> tuple[int, int]:
    """Tokens and hidden size of a residual.

    Raises:
        TypeError, ValueError: it is no contiguous `[T, 4, H]` bf16 with H a multiple of 8.
    """
    if tensor.ndim != 3 or tensor.shape[1] != STREAMS or tensor.shape[2] % COLUMNS or not tensor.shape[2]:
        raise ValueError(f"residual must be [T, {STREAMS}, H], H a multiple of 8, got {list(tensor.shape)}")
    of(tensor, "residual", "bfloat16", tuple(tensor.shape))
    return tensor.shape[0], tensor.shape[2]


def of(tensor: torch.Tensor, name: str, dtype: str, *shapes: tuple[int, ...]) -> None:
    """Checks that a tensor is contiguous, aligned to 16 bytes, and of one of the shapes.

    Raises:
        TypeError: another dtype.
        ValueError: anything else.
    """
    if str(tensor.dtype) != f"torch.{dtype}":
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must be {wanted}, got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if tensor.numel() and tensor.data_ptr() % 16:
        raise ValueError(f"{name} must start at a multiple of 16 bytes")


def post_inputs(
    x: torch.Tensor, tensor: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks what post takes; returns the mixes as `[T, 4]` and `[T, 16]`."""
    tokens, hidden = residual(tensor)
    of(x, "x", "bfloat16", (tokens, hidden))
    of(post_layer_mix, "post_layer_mix", "float32", (tokens, STREAMS, 1), (tokens, STREAMS))
    of(comb_res_mix, "comb_res_mix", "float32", (tokens, STREAMS, STREAMS))
    return post_layer_mix.view(tokens, STREAMS), comb_res_mix.view(tokens, STREAMS * STREAMS)


def pre_inputs(
    tokens: int,
    hidden: int,
    inputs: int,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    sinkhorn_repeat: int,
    pre_mix: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> None:
    """Checks what a pre step takes beside the residual; `inputs` is the width that is projected."""
    of(fn, "fn", "float32", (MIXES, inputs))
    of(hc_scale, "hc_scale", "float32", (3,))
    of(hc_base, "hc_base", "float32", (MIXES,))
    if sinkhorn_repeat < 1:
        raise ValueError(f"sinkhorn_repeat must be at least 1, got {sinkhorn_repeat}")
    if pre_mix is not None:
        of(pre_mix, "pre_mix", "float32", (tokens, STREAMS))
    if norm_weight is not None:
        of(norm_weight, "norm_weight", "bfloat16", (hidden,))


def pre_outputs(
    tensor: torch.Tensor, out: tuple[torch.Tensor, ...] | None
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Outputs]:
    """The outputs of a pre step as the caller sees them and as the kernels do, from `out` or new."""
    import torch

    from .tilelang import Outputs

    tokens, _, hidden = tensor.shape
    if out is None:
        float32 = {"dtype": torch.float32, "device": tensor.device}
        out = (
            torch.empty((tokens, STREAMS, 1), **float32),
            torch.empty((tokens, STREAMS, STREAMS), **float32),
            tensor.new_empty((tokens, hidden)),
            torch.empty((tokens, STREAMS), **float32),
        )
    post, comb, layer_input, next_pre = out
    of(post, "out[0]", "float32", (tokens, STREAMS, 1))
    of(comb, "out[1]", "float32", (tokens, STREAMS, STREAMS))
    of(layer_input, "out[2]", "bfloat16", (tokens, hidden))
    of(next_pre, "out[3]", "float32", (tokens, STREAMS))
    flat = Outputs(post.view(tokens, STREAMS), comb.view(tokens, STREAMS * STREAMS), layer_input, next_pre)
    return (post, comb, layer_input, next_pre), flat
