"""vLLM's own KV cache accounting for DeepSeek-V4.1, as a pure function: blocks, tokens and concurrency of some bytes.

The same in 0.30 to 0.33 for this model. Sources are named as in `groups`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_cli.planner.groups import WINDOW_BLOCK, Group, Page, Traffic, groups, pages
from deepinfer_cli.planner.shape import Shape

__all__ = [
    "Group",
    "Page",
    "Pool",
    "Traffic",
    "borrowed",
    "groups",
    "missing",
    "pages",
    "pool",
    "request_blocks",
    "stages",
]


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache as vLLM reports it.

    Attributes:
        blocks: of every GPU; the stage with the fewest decides (`planning:get_kv_cache_configs`).
        block_bytes: of each stage.
        request_blocks: that one request of the full context may hold.
        context: tokens of that request.
        limiting: index of the stage that decides.
        groups: (kind, pages) of each group of the whole model.
    """

    blocks: int
    block_bytes: tuple[int, ...]
    request_blocks: int
    context: int
    limiting: int
    groups: tuple[Group, ...]

    @property
    def concurrency(self) -> float:
        """`Maximum concurrency` (`v1/core/kv_cache_utils.py:get_max_concurrency_for_kv_cache_config`)."""
        return self.blocks / self.request_blocks

    @property
    def tokens(self) -> int:
        """`GPU KV cache size` (`v1/core/kv_cache_utils.py:get_kv_cache_capacity`)."""
        return int(self.concurrency * self.context)

    @property
    def starts(self) -> bool:
        """vLLM starts: a request of the full context fits beside the block that is held back (`get_kv_cache_configs`)."""
        return self.blocks - 1 >= self.request_blocks


def request_blocks(group: Group, shape: Shape, traffic: Traffic, stages: int) -> int:
    """Blocks of a group that one request of the full context may hold (`specs`: `max_memory_usage_bytes` of each kind)."""
    if group.kind == "ring":
        return 1
    if group.kind == "compressed":
        return -(-traffic.context // group.pages[0].tokens)
    held = min(shape.window - 1 + traffic.in_flight(stages), traffic.context)
    # one more: the window may begin inside a block (`specs:SlidingWindowSpec.max_admission_blocks_per_request`)
    return -(-held // WINDOW_BLOCK) + 1


def borrowed(shape: Shape, layers: range) -> int | None:
    """The KV source on an earlier stage whose caches `layers` read; None where they read none of another stage.

    Stock vLLM 0.30 to 0.33 refuses such a stage; one that replicates the caches would hold them again there.
    """
    first = next((layer for layer in layers if layer < shape.layers and shape.ratios[layer]), None)
    source = max((one for one in shape.kv_sources if first is not None and one <= first), default=None)
    return source if source is not None and source not in layers else None


def stages(shape: Shape, partition: Sequence[int]) -> list[range]:
    """The layers of each stage, without DSpark's."""
    starts = [sum(partition[:index]) for index in range(len(partition))]
    return [range(start, start + count) for start, count in zip(starts, partition, strict=True)]


def missing(shape: Shape, partition: Sequence[int], traffic: Traffic) -> list[tuple[int, Group]]:
    """Stages that own no page of a group, which stock vLLM 0.30 to 0.33 cannot allocate.

    `planning:_project_kv_cache_groups_to_worker` leaves such a group the whole model's layers, and
    `v1/worker/utils.py:allocate_kv_cache` finds no group that has them: StopIteration (tests/payload/test_pipeline.py).
    """
    whole = groups(shape, traffic)
    return [
        (index, group)
        for index, layers in enumerate(stages(shape, partition))
        for group in whole
        if not group.on(layers)
    ]


def pool(shape: Shape, partition: Sequence[int], traffic: Traffic, available: Sequence[int]) -> Pool:
    """The KV cache of a pipeline.

    Args:
        partition: layers of each stage; DSpark's layers are on the last. A stage that reads caches of an earlier one is
            taken to hold them, too.
        available: bytes that each stage's GPU has for the KV cache; under TP every GPU of a stage has the same.

    Returns:
        What vLLM reports. Prefix caching and `--max-num-seqs` do not change it: the pages are the same, and a request's
        share is that of one request.
    """
    whole = groups(shape, traffic)
    own = stages(shape, partition)
    held = [*own[:-1], range(own[-1].start, own[-1].stop + shape.draft_layers)]
    block_bytes = tuple(max(group.on(layers, borrowed(shape, layers)) for group in whole) for layers in held)
    counts = [
        max(have, 0) // size if size else sys.maxsize
        for have, size in zip(available, block_bytes, strict=True)
    ]
    needed = sum(request_blocks(group, shape, traffic, len(partition)) for group in whole)
    limiting = min(range(len(partition)), key=lambda stage: counts[stage])
    return Pool(counts[limiting], block_bytes, needed, traffic.context, limiting, whole)
