"""V4.1's `amd/rocm.py`: 0.30 and 0.31 define an index combiner of their own there, a chain of torch operations."""

from __future__ import annotations

from .spec import Binding

MODULE = "models.{layout}.amd.rocm"


def _combine(stock):
    """0.30 and 0.31: no replay clamp, and Top-K is also bounded by the width of the index tensor."""

    def combine_topk_swa_indices(
        topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N
    ):
        from .. import warm
        from ..ops.combine import combine

        warm.first_call("combine")
        args = (topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N)
        return combine(*args, replay_clamp=False, width_cap=True)

    return combine_topk_swa_indices


BINDINGS = (Binding("combine_topk_swa_indices", "combine", (_combine,)),)
