"""What the three writers of e4m3 share: the rotation, the power-of-two scale, the codes, and their oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# columns of a cos/sin table: 32 cosines, then 32 sines
ROPE_DIM = 64


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raises unless `tensor` has this dtype and shape (first dim: at least; None: any) and a contiguous last dim.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or a last dim with gaps.
    """
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, is {tensor.dtype}")
    actual = tuple(tensor.shape)
    fits = len(actual) == len(shape) and (shape[0] is None or actual[0] >= shape[0])
    if not fits or any(want not in (None, got) for want, got in zip(shape[1:], actual[1:], strict=True)):
        raise ValueError(f"{name} must have shape {shape} (None: any, first: at least), has {actual}")
    if tensor.stride(-1) != 1 and actual[-1] > 1:
        raise ValueError(f"{name}'s last dim must be contiguous, its strides are {tensor.stride()}")


def check_writer(
    positions: torch.Tensor, cos_sin_cache: torch.Tensor, slots: torch.Tensor, compress_ratio: int
) -> int:
    """Checks what both cache writers take beside their rows; returns how many tokens there are.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a stride or the ratio does not fit.
    """
    import torch

    check("slot_mapping", slots, torch.int64, (None,))
    check("positions", positions, torch.int64, (slots.shape[0],))
    check("cos_sin_cache", cos_sin_cache, torch.float32, (None, ROPE_DIM))
    if compress_ratio < 1:
        raise ValueError(f"compress_ratio must be positive, is {compress_ratio}")
    return int(slots.shape[0])


def check_pages(name: str, cache: torch.Tensor, record_bytes: int, unit: int) -> None:
    """Raises unless `cache` holds pages of such records that start at multiples of `unit` bytes.

    Raises:
        TypeError: its elements are not bytes.
        ValueError: a shape, a stride or an address does not fit.
    """
    import torch

    check(name, cache, torch.uint8, (None, None, record_bytes))
    if cache.shape[1] < 1:
        raise ValueError(f"{name} has pages of {cache.shape[1]} records")
    if (cache.data_ptr() | cache.stride(0)) % unit:
        raise ValueError(f"{name}'s pages must start at multiples of {unit} bytes")
