"""V4's `common/ops/fused_indexer_q.py`, which V4.1 imports: the indexer's queries.

`DeepseekV4Indexer` of V4.1 (`forward`, from 0.31 on `forward_q`) and of V4 call it with bf16 queries `[tokens, heads, 128]`, bf16
weights and the float32 cos/sin table. They hand the queries on as they come, so those must be `float8_e4m3fn`; the weights
carry every factor of the score but the keys' scales. Stock has two kernels: CuTeDSL, which needs conversions of 8.9 and
later, and Triton, which needs the fp8 type.
"""

from __future__ import annotations

import inspect
from typing import Any

from .spec import Binding

MODULE = "models.deepseek_v4.common.ops.fused_indexer_q"
FLOAT32 = "torch.float32"


def _quantize(stock):
    """0.30: the weights are float32."""

    # fmt: off
    def fused_indexer_q_rope_quant(
        positions, index_q, index_q_cos_sin_cache, index_weights, index_weights_softmax_scale,
        index_weights_head_scale, use_fp4=False,
    ):
        # fmt: on
        factors = (index_weights_softmax_scale, index_weights_head_scale)
        return _call(positions, index_q, index_q_cos_sin_cache, index_weights, factors, use_fp4, FLOAT32)

    return fused_indexer_q_rope_quant


def _quantize_to(stock):
    """0.31 and later: the caller names the weights' type, bf16 only for sparse logits over an MXFP4 cache."""
    float32 = _default(stock, "weights_out_dtype")

    # fmt: off
    def fused_indexer_q_rope_quant(
        positions, index_q, index_q_cos_sin_cache, index_weights, index_weights_softmax_scale,
        index_weights_head_scale, use_fp4=False, weights_out_dtype=float32,
    ):
        # fmt: on
        factors = (index_weights_softmax_scale, index_weights_head_scale)
        dtype = str(weights_out_dtype)
        return _call(positions, index_q, index_q_cos_sin_cache, index_weights, factors, use_fp4, dtype)

    return fused_indexer_q_rope_quant


def _default(stock: Any, name: str) -> Any:
    """The stock function's own default, if it is float32: this module cannot name torch's types when it is imported."""
    found = inspect.signature(stock).parameters.get(name)
    return found.default if found is not None and str(found.default) == FLOAT32 else FLOAT32


def _call(
    positions: Any,
    q: Any,
    cos_sin_cache: Any,
    weights: Any,
    factors: tuple[float, float],
    use_fp4: bool,
    dtype: str,
) -> Any:
    from .. import warm
    from ..ops.indexer_q import indexer_q

    warm.first_call("indexer_q")
    if use_fp4 or dtype != FLOAT32:
        raise ValueError(
            f"indexer queries in {'MXFP4' if use_fp4 else 'e4m3'} with weights in {dtype} need compute capability 10.x: "
            "leave attention_config.indexer_kv_dtype at auto and indexer_sparse_logits off"
        )
    return indexer_q(positions, q, cos_sin_cache, weights, factors[0] * factors[1])


BINDINGS = (Binding("fused_indexer_q_rope_quant", "indexer_q", (_quantize, _quantize_to)),)
