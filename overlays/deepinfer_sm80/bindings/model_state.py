"""`models/deepseek_v41/nvidia/model_state.py` (0.31 and later): which cache groups a replay of the window must not write.

`DeepseekV41ModelState.prepare_attn` notes the numbers of the prefix-cacheable groups at its first call and keeps them. That
call is made while CUDA graphs are profiled, on a throw-away cache whose groups are made of this process's layers alone.
Without a pipeline they are the groups that it serves with. With one they are made of all stages' layers: other groups, in
other numbers, so a replay would write over cached keys and values, and pad slots outside the table. Ours lets it look
again where the groups are not those that it has seen. Where they are, nothing changes.
"""

from __future__ import annotations

from typing import Any

from .spec import Binding

MODULE = "models.{layout}.nvidia.model_state"
_SEEN = "_deepinfer_cacheable"


def _prepare(stock):
    """0.31 and later."""

    # fmt: off
    def prepare_attn(
        self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config,
        for_capture=False, ubatch_idx=0, model_specific_attn_metadata=None,
    ):
        # fmt: on
        _look_again(self, kv_cache_config.kv_cache_groups)
        return stock(
            self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config,
            for_capture, ubatch_idx, model_specific_attn_metadata,
        )  # fmt: skip

    return prepare_attn


def _look_again(state: Any, groups: list[Any]) -> None:
    seen, cacheable = vars(state).get(_SEEN, (None, None))
    # the same list at every step but the first of a cache
    if seen is groups:
        return
    now = [group.kv_cache_spec.prefix_cacheable for group in groups]
    if cacheable is not None and now != cacheable:
        state._replay = None
        if hasattr(state, "_replay_attn_groups"):
            state._replay_attn_groups = None
    setattr(state, _SEEN, (groups, now))


BINDINGS = (Binding("DeepseekV41ModelState.prepare_attn", "pipeline", (_prepare,)),)
