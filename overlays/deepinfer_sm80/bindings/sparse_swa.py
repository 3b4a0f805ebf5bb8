"""`v1/attention/backends/mla/sparse_swa.py`: the sliding window's cache and metadata.

`build_tile_scheduler` (all four, one signature) is called for every step with decodes. On a CUDA card it asks FlashMLA's
extension for an empty plan, and raises where that cannot be imported; on ROCm, XPU and capability 12 it returns no
plans, as for a step without decodes. Nobody reads the plans on SM8x: `tile_sched_swaonly`, `_c1a` and `_c2a` are read by
`nvidia/flashmla.py::_forward_decode` alone (V4's also the other two), which is not the class that serves SM8x; the
attention class from `amd/rocm.py` never names them, and `sparse_swa.py` itself only carries them along.

`DeepseekV4SWACache.__init__`: with `bounded_replay` (0.31 and later, on by default) the window's keys are no part of
prefix caching; the last 128 tokens before a hit are computed again, and may not look further back than where that began,
for there is nothing. Metadata, gather and decode's lists begin there in all three releases. The index combiner of
`common/ops/cache_utils.py` does, too (`replay_clamp`); the one that `amd/rocm.py` has of its own in 0.31 does not: its
rows would lie before the gathered window, in the compressed keys. So replay is off where that module defines a combiner,
and as vLLM's configuration says where it takes the common one. In 0.32 and later the same flag lets the layers from the
last KV source on run on each request's last 128 tokens alone, under metadata of their own with the same clamps; vLLM
0.33's model for AMD cards does this with the same attention class. A pipeline stage that begins with the last KV source
has no layer before the replay, and `_run_layers` of both asserts that there was one (any card, no attention class
matters): replay is off there, on every stage, for their caches must be of one kind.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from .spec import Binding

MODULE = "v1.attention.backends.mla.sparse_swa"
COMBINE = "combine_topk_swa_indices"
_log = logging.getLogger(__name__)
_said: list[str] = []


def _no_plans(stock):
    """All four."""

    def build_tile_scheduler(self, num_decode_tokens):
        # what stock returns for a step without decodes: every kind of layer, without a plan
        return stock(self, 0)

    return build_tile_scheduler


def _cache(stock):
    """0.30, which has no replay."""

    # fmt: off
    def __init__(
        self, head_dim, window_size, dtype, prefix, cache_config, backend_cls=None, block_size=64,
        packed_bytes_per_token=584, packed_page_alignment=576,
    ):
        # fmt: on
        stock(
            self, head_dim, window_size, dtype, prefix, cache_config, backend_cls, block_size, packed_bytes_per_token,
            packed_page_alignment,
        )  # fmt: skip

    return __init__


def _cache_with_replay(stock):
    """0.31 and 0.32."""

    # fmt: off
    def __init__(
        self, head_dim, window_size, dtype, prefix, cache_config, backend_cls=None, block_size=64,
        packed_bytes_per_token=584, packed_page_alignment=576, bounded_replay=False,
    ):
        # fmt: on
        stock(
            self, head_dim, window_size, dtype, prefix, cache_config, backend_cls, block_size, packed_bytes_per_token,
            packed_page_alignment, bounded_replay=bounded_replay and _replays(stock),
        )  # fmt: skip

    return __init__


def _cache_with_stride(stock):
    """0.33, which can also align the packed blocks."""

    # fmt: off
    def __init__(
        self, head_dim, window_size, dtype, prefix, cache_config, backend_cls=None, block_size=64,
        packed_bytes_per_token=584, packed_page_alignment=576, packed_block_stride_alignment=None,
        bounded_replay=False,
    ):
        # fmt: on
        stock(
            self, head_dim, window_size, dtype, prefix, cache_config, backend_cls, block_size, packed_bytes_per_token,
            packed_page_alignment, packed_block_stride_alignment, bounded_replay=bounded_replay and _replays(stock),
        )  # fmt: skip

    return __init__


def _replays(stock: Any) -> bool:
    root = stock.__globals__["__name__"].partition(".")[0]
    reason = _reads_too_early(root) or _stage_begins_with_replay(root, stock.__globals__)
    if reason and reason not in _said:
        _log.warning("SWA bounded replay is off: %s", reason)
        _said.append(reason)
    return not reason


def _reads_too_early(root: str) -> str:
    """The combiner that does not keep to what the replay has written; its module is imported by now, or not used."""
    from . import LAYOUTS

    for name in (f"{root}.models.{layout}.amd.rocm" for layout in LAYOUTS):
        combine = vars(sys.modules[name]).get(COMBINE) if name in sys.modules else None
        # our replacement goes by the name of the module that it is in
        if combine is not None and combine.__module__ == name:
            return f"{name} of this vLLM reads before the replay's start"
    return ""


def _stage_begins_with_replay(root: str, scope: dict[str, Any]) -> str:
    config = scope["get_current_vllm_config"]()
    stages = config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return ""
    model = config.model_config.hf_config
    layers_of = importlib.import_module(f"{root}.distributed.utils").get_pp_indices
    first = max(model.kv_source_layer_ids)
    for rank in range(1, stages):
        if layers_of(model.num_hidden_layers, rank, stages)[0] == first:
            return f"pipeline stage {rank} begins with layer {first}, where the replay would"
    return ""


BINDINGS = (
    Binding("DeepseekSparseSWAMetadataBuilder.build_tile_scheduler", "tile_scheduler", (_no_plans,)),
    Binding("DeepseekV4SWACache.__init__", "swa_replay", (_cache, _cache_with_replay, _cache_with_stride)),
)
