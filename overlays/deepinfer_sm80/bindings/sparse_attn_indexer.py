"""`model_executor/layers/sparse_attn_indexer.py`: the indexer's logits, and what its constructor asks for.

The functions are imported there from `vllm.utils.deep_gemm`; the custom op's body looks them up in the module at every
call, so the module's own names are what is replaced (`Binding.origin`).

`SparseAttnIndexer.__init__` (all four) raises on a CUDA device without DeepGEMM, which is only asked for there: the two
logits functions are all that the layer takes from it. With both of ours in place DeepGEMM is not needed, and it need
not be importable; with one of them left to stock the answer is stock's.

What the one caller of the logits, `sparse_attn_indexer`, relies on, by release:

- Prefill, 0.30-0.32: a row's keys keep their columns, and top-k and the candidate kernels are given ks and ke.
  0.33: a row starts at its first key (`max_seqlen_k` columns), and they are given 0 and ke - ks.
- Decode (all four): `max_model_len` columns (in states), and they are given the lengths.
- They read no column outside those bounds, so `clean_logits` is False wherever it exists. `_apply_candidate_mask`
  writes into the logits, so they are memory of their own.
- The scale of q is None (it is in the weights, with the softmax scale and 32^-0.5: `fused_indexer_q_rope_quant`), and
  `indices` too: rows of varying length per request are for capability 10. The schedule is not looked at.
- All logits have float32 and rows that begin at multiples of 1 KB, as DeepGEMM's: top-k reads 16 bytes at a time.

The candidate kernels (two-level selection: layer 20 publishes blocks, 24, 28, 32 and 36 mask their logits to them) are
stock's and compile on SM8x. The indexer that scores candidate blocks alone (`indexer_sparse_logits`, 0.31 and later)
insists on the MXFP4 cache, which is refused here. V3.2's and V4's 64 heads are refused as well, with a ValueError.
"""

from __future__ import annotations

from typing import Any

from .spec import Binding

MODULE = "model_executor.layers.sparse_attn_indexer"
DEEP_GEMM = "vllm.utils.deep_gemm"
LOGITS = frozenset({"indexer_prefill", "indexer_decode"})


def _has_logits(stock):
    """All four."""

    def has_deep_gemm():
        from .. import bound_ops

        return bound_ops() >= LOGITS or stock()

    return has_deep_gemm


def _prefill(stock):
    """0.30 to 0.32: a column per key of the chunk."""

    def fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits):
        width = kv[0].shape[0]
        return _prefill_logits(
            q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, width, clean_logits, compressed=False
        )

    return fp8_fp4_mqa_logits


def _prefill_compressed(stock):
    """0.33: rows start at their first key."""

    def fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k):
        return _prefill_logits(
            q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k, False, compressed=True
        )

    return fp8_fp4_mqa_logits


def _prefill_logits(
    q: Any, kv: Any, weights: Any, ks: Any, ke: Any, width: int, clean: bool, *, compressed: bool
) -> Any:
    from .. import warm
    from ..ops.indexer_prefill import indexer_prefill

    warm.first_call("indexer_prefill")
    logits = _logits(q, q[0].shape[0], width, clean)
    indexer_prefill(q[0], kv[0], kv[1], weights, ks, ke, logits, compressed=compressed)
    return logits


def _decode_cleaning(stock):
    """0.30 to 0.32."""

    # fmt: off
    def fp8_fp4_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits, indices=None
    ):
        # fmt: on
        return _decode_logits(q, kv_cache, weights, context_lens, block_tables, max_model_len, clean_logits, indices)

    return fp8_fp4_paged_mqa_logits


def _decode(stock):
    """0.33: the columns after a context are never cleaned."""

    # fmt: off
    def fp8_fp4_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices=None
    ):
        # fmt: on
        return _decode_logits(q, kv_cache, weights, context_lens, block_tables, max_model_len, False, indices)

    return fp8_fp4_paged_mqa_logits


def _decode_logits(
    q: Any, kv_cache: Any, weights: Any, lens: Any, tables: Any, width: int, clean: bool, indices: Any
) -> Any:
    if indices is not None:
        raise ValueError(
            "indices: rows of varying length per request are for compute capability 10, not for SM8x"
        )
    from .. import warm
    from ..ops.indexer_decode import indexer_decode

    warm.first_call("indexer_decode")
    logits = _logits(q, q[0].shape[0] * q[0].shape[1], width, clean)
    indexer_decode(q[0], kv_cache[:, :, 0], weights, lens, tables, logits)
    return logits


def _logits(q: Any, rows: int, width: int, clean: bool) -> Any:
    """Room for the logits: rows at multiples of 1 KB, all minus infinity if they are to be clean."""
    import torch

    if q[1] is not None:
        raise ValueError(
            "the MXFP4 indexer cache is for compute capability 10, not for SM8x: leave indexer_kv_dtype at fp8"
        )
    memory = torch.empty((rows, -(-width // 256) * 256), dtype=torch.float32, device=q[0].device)
    return (memory.fill_(float("-inf")) if clean else memory)[:, :width]


BINDINGS = (
    Binding("has_deep_gemm", "indexer_metadata", (_has_logits,), origin=DEEP_GEMM),
    Binding("fp8_fp4_mqa_logits", "indexer_prefill", (_prefill, _prefill_compressed), origin=DEEP_GEMM),
    Binding("fp8_fp4_paged_mqa_logits", "indexer_decode", (_decode_cleaning, _decode), origin=DEEP_GEMM),
)
