"""`model_executor/kernels/mhc/tilelang.py`: the mHC steps between sublayers, as V4.1's NVIDIA model calls them.

The callers import these functions by name: `nvidia/model.py` (pre_delayed, post), `nvidia/dspark.py` (post),
`nvidia/ops/mhc.py` (fused, post; in 0.30 `nvidia/ops/mega_mhc.py`, fused). They rely on the order and the shapes of the
results, `aux` included, which is empty unless `capture_aux` is set. V4's models call post with other hidden sizes; they,
and any other `hc_mult`, go to stock. So do `torch.ops.vllm.mhc_*`, which hold stock's functions since before the hook.

The first call compiles every variant (see `warm.py`): vLLM makes it in its profile run, before it serves.
"""

from __future__ import annotations

from typing import Any

from .spec import Binding

MODULE = "model_executor.kernels.mhc.tilelang"
HIDDEN_SIZES = (5120,)
HC_MULT = 4


def _pre_delayed(stock):
    # fmt: off
    def mhc_pre_delayed_tilelang(
        residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat,
        pre_mix=None, x=None, norm_weight=None, norm_eps=1e-6,
    ):
        # fmt: on
        numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
        if not _serves(residual):
            return stock(residual, fn, hc_scale, hc_base, *numbers, pre_mix, x, norm_weight, norm_eps)
        from ..ops.mhc.coefficients import Mixing
        from ..ops.mhc_pre_delayed import mhc_pre_delayed

        return mhc_pre_delayed(
            residual, fn, hc_scale, hc_base, Mixing(*numbers),
            pre_mix=pre_mix, x=x, norm_weight=norm_weight, norm_eps=norm_eps,
        )  # fmt: skip

    return mhc_pre_delayed_tilelang


def _fused(stock):
    # fmt: off
    def mhc_fused_post_pre_delayed_tilelang(
        x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps,
        hc_post_mult_value, sinkhorn_repeat, pre_mix=None, norm_weight=None, norm_eps=1e-6, capture_aux=False,
    ):
        # fmt: on
        tensors = x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base
        numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
        if not _serves(residual):
            return stock(*tensors, *numbers, pre_mix, norm_weight, norm_eps, capture_aux)
        from ..ops.mhc.coefficients import Mixing
        from ..ops.mhc_fused_post_pre_delayed import mhc_fused_post_pre_delayed

        return mhc_fused_post_pre_delayed(
            *tensors, Mixing(*numbers),
            pre_mix=pre_mix, norm_weight=norm_weight, norm_eps=norm_eps, capture_aux=capture_aux,
        )  # fmt: skip

    return mhc_fused_post_pre_delayed_tilelang


def _post(stock):
    def mhc_post_tilelang(x, residual, post_layer_mix, comb_res_mix):
        if not _serves(residual):
            return stock(x, residual, post_layer_mix, comb_res_mix)
        from ..ops.mhc_post import mhc_post

        return mhc_post(x, residual, post_layer_mix, comb_res_mix)

    return mhc_post_tilelang


def _serves(residual: Any) -> bool:
    """Whether ours has kernels for these streams; sees to it that they are compiled."""
    if residual.dim() != 3 or residual.shape[1] != HC_MULT or residual.shape[2] not in HIDDEN_SIZES:
        return False
    from .. import warm

    warm.first_call(residual.shape[2])
    return True


BINDINGS = (
    Binding("mhc_pre_delayed_tilelang", "mhc_pre_delayed", (_pre_delayed,)),
    Binding("mhc_fused_post_pre_delayed_tilelang", "mhc_fused_post_pre_delayed", (_fused,)),
    Binding("mhc_post_tilelang", "mhc_post", (_post,)),
)
