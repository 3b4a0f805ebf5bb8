"""Argument checks that the ops share: what does not fit is named in the error, with what was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_HEADS = 128


def tensor(
    name: str,
    given: torch.Tensor,
    dtype: str,
    *shapes: tuple[int | None, ...],
    fewest: int = 0,
    whole: bool = False,
) -> None:
    """Checks one tensor argument.

    Args:
        name: of the argument.
        dtype: name in `torch`, such as `bfloat16`.
        shapes: one of them must fit; None stands for any size.
        fewest: smallest size of the first dim.
        whole: contiguous in all its dims, and from a multiple of 16 bytes on. Otherwise only the last dim must be
            contiguous.

    Raises:
        TypeError: another dtype.
        ValueError: anything else.
    """
    if str(given.dtype) != f"torch.{dtype}":
        raise TypeError(f"{name} must be torch.{dtype}, is {given.dtype}")
    actual = given.shape
    if actual not in shapes and not _fits(actual, shapes):
        wanted = " or ".join(map(str, shapes))
        free = " (None: any)" if "None" in wanted else ""
        raise ValueError(f"{name} must have shape {wanted}{free}, has {tuple(actual)}")
    if actual[0] < fewest:
        raise ValueError(f"{name} must have {fewest} entries or more in its first dim, has {actual[0]}")
    if whole:
        if not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {given.stride()}")
        if given.data_ptr() % 16 and given.numel():
            raise ValueError(f"{name} must start at a multiple of 16 bytes, is at {given.data_ptr():#x}")
    elif actual[-1] > 1 and given.stride(-1) != 1:
        raise ValueError(f"{name}'s last dim must be contiguous, its strides are {given.stride()}")


def attention(
    q: torch.Tensor, out: torch.Tensor, sink: torch.Tensor | None, head_dim: int
) -> tuple[int, int]:
    """Tokens and heads of a sparse attention: bfloat16 `[T, H, head_dim]` q and out, at least H float32 sinks or None.

    Raises:
        TypeError, ValueError: as `tensor`, or H is not from 1 to 128.
    """
    tensor("q", q, "bfloat16", (None, None, head_dim))
    tokens, heads = q.shape[:2]
    tensor("out", out, "bfloat16", (tokens, heads, head_dim))
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q must have 1 to {MAX_HEADS} heads, has {heads}")
    if sink is not None:
        tensor("sink", sink, "float32", (None,), fewest=heads)
    return tokens, heads


def _fits(actual: tuple[int, ...], shapes: tuple[tuple[int | None, ...], ...]) -> bool:
    # plain loops: they run several times per call of an op
    for shape in shapes:
        if len(shape) == len(actual):
            for want, got in zip(shape, actual, strict=True):
                if want is not None and want != got:
                    break
            else:
                return True
    return False
