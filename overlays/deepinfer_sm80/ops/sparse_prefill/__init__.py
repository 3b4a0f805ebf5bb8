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
    from .. import check

    tokens, _heads = check.attention(q, out, sink, HEAD_DIM)
    check.tensor("kv", kv, "bfloat16", (None, HEAD_DIM))
    if lengths is not None and indptr is None:
        starts = lengths
        check.tensor("indices", indices, "int32", (tokens, None))
        check.tensor("lengths", lengths, "int32", (None,), fewest=tokens)
    elif indptr is not None and lengths is None:
        starts = indptr
        check.tensor("indices", indices, "int32", (None,))
        check.tensor("indptr", indptr, "int32", (None,), fewest=tokens + 1)
    else:
        raise ValueError("exactly one of lengths (dense) and indptr (ragged) must be given")
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
