"""Sparse MLA prefill: each query token attends to its own list of gathered bf16 KV rows, with a sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HEAD_DIM = 512


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    *,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
) -> None:
    """Writes `out[t, h] = sum_i p_i * kv[slot_i]` over the valid slots of token t; a KV row is key and value at once.

    With `s_i = scale * (q[t, h] . kv[slot_i])`, `p_i = exp(s_i) / (exp(sink[h]) + sum_j exp(s_j))`: the sink is in the
    denominator only. A slot is valid if it lies in `[0, R)`; others are skipped and may stand anywhere. A slot that is
    listed twice counts twice. A token without a valid slot gets zeros, with a sink too. The output is not rotated.

    The slots of token t are `indices[t, :lengths[t]]` (dense) or `indices[indptr[t]:indptr[t + 1]]` (ragged); one of
    `lengths` and `indptr` must be given. Products and sums are float32; p is rounded to bfloat16 before it meets the values.

    Args:
        q: bfloat16 `[T, H, 512]`, last dim contiguous, any other strides; H from 1 to 128.
        kv: bfloat16 `[R, 512]`, last dim contiguous, any row stride. Rows that no valid slot names are not used, whatever
            they hold.
        out: bfloat16 `[T, H, 512]`, last dim contiguous, any other strides.
        scale: of the scores.
        sink: float32 `[>= H]`, -inf for none; None for no sink at all.
        indices: int32 `[T, W]` with any row stride, or `[nnz]` when ragged; last dim contiguous.
        lengths: int32 `[>= T]`, from 0 to W (a longer one is cut to W, a negative one is 0).
        indptr: int32 `[>= T + 1]`, not decreasing, within `indices`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape or a stride does not fit, or not exactly one of `lengths` and `indptr` is given.
    """
    import torch

    tokens, heads = q.shape[:2]
    if lengths is not None and indptr is None:
        name, starts, fewest = "lengths", lengths, tokens
    elif indptr is not None and lengths is None:
        name, starts, fewest = "indptr", indptr, tokens + 1
    else:
        raise ValueError("exactly one of lengths (dense) and indptr (ragged) must be given")
    _check("q", q, torch.bfloat16, (None, None, HEAD_DIM))
    _check("kv", kv, torch.bfloat16, (None, HEAD_DIM))
    _check("out", out, torch.bfloat16, (tokens, heads, HEAD_DIM))
    _check("indices", indices, torch.int32, (tokens, None) if indptr is None else (None,))
    _check(name, starts, torch.int32, (None,))
    if starts.shape[0] < fewest:
        raise ValueError(f"{name} must have {fewest} entries for {tokens} tokens, has {starts.shape[0]}")
    if not 1 <= heads <= 128:
        raise ValueError(f"q must have 1 to 128 heads, has {heads}")
    if sink is not None:
        _check("sink", sink, torch.float32, (None,))
        if sink.shape[0] < heads:
            raise ValueError(f"sink must have {heads} entries, one per head, has {sink.shape[0]}")
    if tokens:
        launch = _launcher(q, kv, out)
        launch(q, kv, out, float(scale), sink, indices, starts, ragged=lengths is None)


def _launcher(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> Any:
    """TileLang's launch; Triton's in the interpreter, without TileLang, and for rows that are not 16-byte aligned."""
    from . import tilelang

    if tilelang.serves(q, kv, out):
        return tilelang.launch
    from . import triton

    return triton.launch


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raises unless `tensor` has this dtype and shape (None: any) and a contiguous last dim."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, is {tensor.dtype}")
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(
        want not in (None, got) for want, got in zip(shape, actual, strict=True)
    ):
        raise ValueError(f"{name} must have shape {shape} (None: any), has {actual}")
    if actual[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}'s last dim must be contiguous, its strides are {tensor.stride()}")
