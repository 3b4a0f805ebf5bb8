"""Looks up rows of Engram's n-gram tables: e4m3 codes with a UE8M0 scale for every 32, as bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# elements that share a scale
BLOCK = 32


def engram(
    out: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    head_start: int,
    vocab_start: int,
    vocab_end: int,
    peers: torch.Tensor | None = None,
    peer_rows: int = 0,
    background: bool = False,
) -> None:
    """`out[t, h]` becomes the table's row `ids[t, head_start + h] - vocab_start`, or zeros where there is none.

    There is none where `head_start + h` is no column of `ids` (a rank whose share of the heads is not full) and where
    the id is outside `[vocab_start, vocab_end)`: another rank's, or -1 for a token that takes no part. Such an id is
    never followed. A value is `e4m3 * 2^(scale - 127)`, rounded once to bf16 (nearest even, subnormals kept).

    Args:
        out: bfloat16 `[T, heads, dim]`, last dim contiguous, any other strides; every element is written.
        ids: int32 `[T, all heads]`, any strides.
        weight: e4m3 codes `[rows, dim]` as float8_e4m3fn or uint8, contiguous, dim a multiple of 32; of any size, on the
            GPU or in pinned host memory that the GPU can read (stock's UVA views).
        scales: uint8 UE8M0 codes `[rows, dim / 32]`, contiguous.
        head_start: first column of `ids` that belongs to this rank.
        vocab_start, vocab_end: ids of the rows that can be read.
        peers: int64 `[ranks]`, addresses of the ranks' parts of one table, each `peer_rows` rows of codes and then their
            scales; row r is row `r % peer_rows` of part `r // peer_rows`. `weight` and `scales`, then this rank's part,
            are not read but say what a row is.
        peer_rows: rows of each part; 0 without `peers`.
        background: take half of the SMs, for lookups beside the decoder's own kernels.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a stride or a number does not fit.

    Notes:
        Where stock vLLM 0.30-0.33 gives another result for a scale: code 0 (2^-127) is 0 there; 255 (NaN) is an infinity.
        The tables of the checkpoint have neither.
    """
    import torch

    from .triton import launch

    if weight.dtype == torch.float8_e4m3fn:
        weight = weight.view(torch.uint8)
    _check("out", out, torch.bfloat16, 3)
    _check("ids", ids, torch.int32, 2)
    _check("weight", weight, torch.uint8, 2)
    _check("scales", scales, torch.uint8, 2)
    tokens, heads, dim = out.shape
    if ids.shape[0] != tokens:
        raise ValueError(f"ids are for {ids.shape[0]} tokens, out for {tokens}")
    if dim % BLOCK or dim != weight.shape[1] or scales.shape != (weight.shape[0], dim // BLOCK):
        shapes = f"{tuple(out.shape)}, {tuple(weight.shape)}, {tuple(scales.shape)}"
        raise ValueError(
            f"out, weight and scales do not fit, with a scale for every {BLOCK} of a row: {shapes}"
        )
    if out.stride(2) != 1 or not (weight.is_contiguous() and scales.is_contiguous()):
        raise ValueError("rows of out, and all of weight and scales, must be contiguous")
    if head_start < 0 or not 0 <= vocab_start <= vocab_end:
        raise ValueError(f"{head_start=}, {vocab_start=}, {vocab_end=} are no range")
    if peers is None:
        if vocab_end - vocab_start > weight.shape[0]:
            raise ValueError(f"ids of {vocab_end - vocab_start} rows, the table has {weight.shape[0]}")
    else:
        _check("peers", peers, torch.int64, 1)
        if peer_rows * peers.shape[0] < vocab_end - vocab_start or not peers.is_contiguous():
            raise ValueError(f"{peers.shape[0]} parts of {peer_rows} rows, ids of {vocab_end - vocab_start}")
    if tokens and heads:
        launch(out, ids, weight, scales, peers, (head_start, vocab_start, vocab_end, peer_rows), background)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, dims: int) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, is {tensor.dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dims, has shape {tuple(tensor.shape)}")
