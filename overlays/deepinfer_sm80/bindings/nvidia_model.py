"""V4.1's `nvidia/model.py`: which attention class its decoder layers get, and with them DSpark's drafter layers.

The function is called once for each layer, in the worker, and has one signature in all four releases. What stock chooses
from (FlashMLA, from 0.31 on mega attention, FlashInfer) has no kernels for compute capability 8.x.
"""

from __future__ import annotations

from .spec import Binding

MODULE = "models.{layout}.nvidia.model"


def _select(stock):
    """All four."""

    def _select_dsv4_attn_cls(vllm_config):
        from ..attention import select

        return select(stock, vllm_config)

    return _select_dsv4_attn_cls


BINDINGS = (Binding("_select_dsv4_attn_cls", "attention", (_select,)),)
