"""V4.1's `common/ops/indexer_k_store.py`: the writer of the indexer's keys.

`DeepseekV4Indexer._produce_k` (all four releases) gets it from `common/ops/__init__.py`. It passes the bf16 product of the
compressor's latent with `wk`, whose rows off the ends of groups are garbage, and int64 positions and slots. What reads the
cache: `cp_gather_indexer_k_quant_cache` and the logits of decode, both by 128 codes per state and a float32 scale.

0.33 stores four bytes of UE8M0 as the scale where `mqa_logits_use_mx_scales()` is true: on compute capability 10.x alone.
"""

from __future__ import annotations

from .spec import Binding

MODULE = "models.{layout}.common.ops.indexer_k_store"


def _store(stock):
    # fmt: off
    def indexer_k_norm_rope_store(
        k_pre, positions, cos_sin_cache, rms_norm_weight, rms_norm_eps, k_cache, kv_slot_mapping, compress_ratio,
        use_fp4_cache,
    ):
        # fmt: on
        from .. import warm
        from ..ops.indexer_k import indexer_k

        warm.first_call("indexer_k")
        if use_fp4_cache:
            raise ValueError(
                "an MXFP4 indexer cache needs compute capability 10.x: leave attention_config.indexer_kv_dtype at auto"
            )
        indexer_k(
            k_pre, positions, cos_sin_cache, rms_norm_weight, rms_norm_eps, k_cache, kv_slot_mapping, compress_ratio
        )

    return indexer_k_norm_rope_store


BINDINGS = (Binding("indexer_k_norm_rope_store", "indexer_k", (_store,)),)
