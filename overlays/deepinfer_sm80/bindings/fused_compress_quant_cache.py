"""V4.1's `common/ops/fused_compress_quant_cache.py`: the writer of compressed KV records.

`DeepseekCompressor.insert_cache` (all four releases) imports it by name. It passes the bf16 latent that
`fused_save_compress_norm` has just written at the ends of groups, int64 positions and slots, and `fp8_scale` only beside a cache
of e4m3 rows. What reads the records: the gather of prefill and the attention of decode, ours or stock's.
"""

from __future__ import annotations

from typing import Any

from .spec import Binding

MODULE = "models.{layout}.common.ops.fused_compress_quant_cache"
RECORD_BYTES = 584


def _insert(stock):
    # fmt: off
    def rope_quant_insert(
        latent, positions, cos_sin_cache, kv_cache, slot_mapping, compress_ratio, fp8_scale=None,
    ):
        # fmt: on
        from .. import warm
        from ..ops.kv_insert import kv_insert

        warm.first_call("kv_insert")
        _check_record(kv_cache, fp8_scale)
        kv_insert(latent, positions, cos_sin_cache, kv_cache, slot_mapping, compress_ratio)

    return rope_quant_insert


def _check_record(kv_cache: Any, fp8_scale: Any) -> None:
    """Stock's writers of the other records do not compile on SM8x, so there is nothing to hand a call on to."""
    width, dtype = kv_cache.shape[-1], kv_cache.dtype
    if width != RECORD_BYTES or fp8_scale is not None:
        raise ValueError(
            f"KV rows of {width} x {dtype} are not used on SM8x, only records of {RECORD_BYTES} bytes: "
            "serve with --kv-cache-dtype fp8 (or auto)"
        )


BINDINGS = (Binding("rope_quant_insert", "kv_insert", (_insert,)),)
