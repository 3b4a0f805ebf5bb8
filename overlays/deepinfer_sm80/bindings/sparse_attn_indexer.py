"""`model_executor/layers/sparse_attn_indexer.py`: the indexer's logits, and what its constructor asks for.

The functions are imported there from `vllm.utils.deep_gemm`; the custom op's body looks them up in the module at every
call, so the module's own names are what is replaced (`Binding.origin`).

`SparseAttnIndexer.__init__` (all four) raises on a CUDA device without DeepGEMM, which is only asked for there: the two
logits functions are all that the layer takes from it. With both of ours in place DeepGEMM is not needed, and it need
not be importable; with one of them left to stock the answer is stock's.
"""

from __future__ import annotations

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


BINDINGS = (Binding("has_deep_gemm", "indexer_metadata", (_has_logits,), origin=DEEP_GEMM),)
