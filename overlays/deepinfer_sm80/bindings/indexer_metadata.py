"""`v1/attention/backends/mla/indexer.py`: the indexer's metadata, which asks DeepGEMM for a schedule at every step.

DeepGEMM's host code knows compute capability 9, 10 and 12 only and raises on any other; where it cannot be imported the
call raises as well. Our paged logits need no schedule. Every question of the module is `is_cuda() and has_deep_gemm()`:

- the schedule (`build`, and in 0.32 and later `update_draft_decode_metadata`): with no, the buffer goes along unfilled;
- `_supports_native_decode`: with no, one or two queries per request, which is also what it says for SM8x with yes;
- `_supports_varlen_paged_mqa_logits` and `_supports_flattened_device_query_lens`: for capability 10 and 9 only.

It is the module's own name that is replaced: other modules have other uses for the answer.
"""

from __future__ import annotations

from .spec import Binding

MODULE = "v1.attention.backends.mla.indexer"
DEEP_GEMM = "vllm.utils.deep_gemm"


def _no_deep_gemm(stock):
    """All four."""

    def has_deep_gemm():
        return False

    return has_deep_gemm


BINDINGS = (Binding("has_deep_gemm", "indexer_metadata", (_no_deep_gemm,), origin=DEEP_GEMM),)
