"""Checks of tensors that both indexer ops take, and e4m3 codes as words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import HEAD_DIM, HEADS

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16


def words(name: str, codes: torch.Tensor) -> torch.Tensor:
    """`codes` (e4m3 or uint8, last dim contiguous) as int32, four codes to a word.

    Raises:
        TypeError: another dtype.
        ValueError: an address or a stride is no multiple of 16 bytes.
    """
    import torch

    if codes.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise TypeError(f"{name} must be torch.float8_e4m3fn or torch.uint8, is {codes.dtype}")
    strides = codes.stride()[:-1]
    if codes.stride(-1) != 1 or codes.data_ptr() % ALIGNMENT or any(one % ALIGNMENT for one in strides):
        raise ValueError(
            f"{name} must have a contiguous last dim, an address and strides that are multiples of {ALIGNMENT} bytes, "
            f"has strides {codes.stride()} at {codes.data_ptr():#x}"
        )
    return codes.view(torch.int32)


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raises unless `tensor` has this dtype, shape (first dim: at least; None: any) and a contiguous last dim."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, is {tensor.dtype}")
    actual = tuple(tensor.shape)
    fits = len(actual) == len(shape) and (shape[0] is None or actual[0] >= shape[0])
    if not fits or any(want not in (None, got) for want, got in zip(shape[1:], actual[1:], strict=True)):
        raise ValueError(f"{name} must have shape {shape} (None: any, first: at least), has {actual}")
    if tensor.stride(-1) != 1 and actual[-1] > 1:
        raise ValueError(f"{name}'s last dim must be contiguous, its strides are {tensor.stride()}")


def check_heads(q: torch.Tensor, dims: int) -> None:
    """Raises unless `q` has `dims` dims, the last two V4.1's heads."""
    if q.dim() != dims or tuple(q.shape[-2:]) != (HEADS, HEAD_DIM):
        raise ValueError(
            f"q must have {dims} dims, the last two {HEADS} heads of {HEAD_DIM} codes, has {tuple(q.shape)}"
        )
