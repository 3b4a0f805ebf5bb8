"""Indexer logits of prefill: every query token against the gathered keys of its request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..indexer import HEAD_DIM, HEADS
from ..indexer.arguments import check, check_heads, words

if TYPE_CHECKING:
    import torch


def indexer_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor,
    *,
    compressed: bool,
) -> None:
    """Writes `sum_h relu(q[m, h] . k[n]) * weights[m, h] * k_scale[n]` for the keys n of each row, `ks[m] <= n < ke[m]`.

    Products of e4m3 codes and their sums are those of bf16 tensor cores with float32 accumulation; the codes themselves
    are exact in bf16. The scale of q, the softmax scale and 32^-0.5 are already in `weights` (`fused_indexer_q_rope_quant`
    puts them there in every release).

    Args:
        q: e4m3 codes `[M, 32, 128]` (float8_e4m3fn or uint8), address and strides multiples of 16 bytes.
        k: e4m3 codes `[N, 128]`, likewise.
        k_scale: float32 `[N]`.
        weights: float32 `[M, 32]`, any row stride.
        ks, ke: int32 `[M]`; what lies outside `[0, N)` is no key.
        out: float32 `[M, W]`, any row stride. Key n goes to column n, or to column `n - ks[m]` if `compressed`; keys whose
            column is not below W are left out. All other columns are left as they are: the callers' top-k and
            candidate kernels read only those from ks to ke (0.33: from 0 to ke - ks).
        compressed: whether rows start at their first key (0.33), or at key 0 (0.30-0.32).

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a stride or an address does not fit.

    Notes:
        Memory: `out` is all there is. vLLM's metadata builder (all four releases) cuts a step into chunks of requests and, of
        a single long request, of rows, so that M * N * 4 bytes stay below VLLM_SPARSE_INDEXER_MAX_LOGITS_MB (512): 128 rows at
        a time at 1,048,576 keys. It counts N over all requests of a chunk, so 0.33's narrower rows are bounded too, and profiling
        reserves as much. Nothing is left to cut here.
        NaN: the codes 0x7f and 0xff count as 480 and -480; a NaN in `weights` or `k_scale` makes its logits NaN.
    """
    import torch

    from .triton import launch

    check_heads(q, 3)
    rows, keys = q.shape[0], k.shape[0]
    check("weights", weights, torch.float32, (rows, HEADS))
    check("k_scale", k_scale, torch.float32, (keys,))
    check("ks", ks, torch.int32, (rows,))
    check("ke", ke, torch.int32, (rows,))
    check("out", out, torch.float32, (rows, None))
    if k.dim() != 2 or k.shape[1] != HEAD_DIM:
        raise ValueError(f"k must have shape (keys, {HEAD_DIM}), has {tuple(k.shape)}")
    if rows == 0 or keys == 0 or out.shape[1] == 0:
        return
    launch(words("q", q), words("k", k), k_scale, weights, ks, ke, out, compressed)
