"""`v1/core/kv_cache_planning.py`: which KV cache groups, and so which memory, a pipeline stage is given.

V4.1's cache groups are `UniformTypeKVCacheSpecs`, one specification per layer. `_project_kv_cache_groups_to_worker` (all four,
one signature; in 0.30 to 0.32 a function of `kv_cache_utils.py`) cuts them down to a stage's layers, and leaves a group
of which the stage has none with all of its layers' specifications. `get_kv_cache_config_from_groups` makes tensors of
these, `allocate_kv_cache` looks for the group that names their layers, and ends the start with StopIteration. In V4.1 the
compressors' states are one group, on layers 2, 8 and 14, so the stages that begin with layer 20 have none of it.

Ours gives such a group one of the specifications, without layers. That is what `generate_scheduler_kv_cache_config`
makes of every group for the scheduler, so block size, blocks per request and block table are the same. Groups with
layers are stock's objects.

Who reads a group without layers then: bytes per block and the check for enough memory go by layer names, blocks per request by
the specification (the wrapper takes the largest of its layers, which need equally many); the model runner makes a block
table of that width for each group, no attention group and no metadata, and skips it at each step. The one caller is
`get_kv_cache_configs` of the same module.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .spec import Binding

MODULE = "v1.core.kv_cache_planning"


def _project(stock):
    """All four."""

    def _project_kv_cache_groups_to_worker(global_kv_cache_groups, worker_spec):
        return [_of_a_stage(group) for group in stock(global_kv_cache_groups, worker_spec)]

    return _project_kv_cache_groups_to_worker


def _of_a_stage(group: Any) -> Any:
    # the wrapper alone has it
    members = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if group.layer_names or not members:
        return group
    return dataclasses.replace(group, kv_cache_spec=next(iter(members.values())))


BINDINGS = (Binding("_project_kv_cache_groups_to_worker", "pipeline", (_project,)),)
