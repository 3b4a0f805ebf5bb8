"""Which pages DeepSeek-V4.1's layers have in vLLM's KV cache, and which of them share a group and so a block table.

The same in 0.30 to 0.33 for this model. Sources are named as file:function of vLLM; `planning` is
`v1/core/kv_cache_planning.py` of 0.33 (`v1/core/kv_cache_utils.py` before), `specs` is `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from deepinfer_cli.planner.shape import Shape

Kind = Literal["compressed", "window", "ring"]
# the record of every card but compute capability 10.x: 448 e4m3, 64 bf16, 7 scales and a pad byte
# (models/deepseek_v41/attention.py, `_use_v41_mxfp8_kv_record`)
RECORD_BYTES = 584
PAGE_ALIGNMENT = 576
# 128 e4m3 and a float32 scale (models/deepseek_v41/attention.py, `_indexer_k_cache_head_dim`)
INDEX_BYTES = 132
# models/deepseek_v41/attention.py: DeepseekV4SWACache(block_size=32)
WINDOW_BLOCK = 32
# models/deepseek_v41/compressor.py, CompressorStateCache.__init__
_SHORTEST_RING = 8
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Page:
    """One layer's share of a block.

    Attributes:
        layer: whose; DSpark's layers follow the model's.
        what: `kv`, `index`, `window` or `ring`.
        kind: which pages may be in one group: `planning:_get_packed_kv_cache_groups` puts full-length ones, windows and
            rings in buckets of their own.
        tokens: that it holds.
        bytes: that it takes, rounded up to the alignment.
    """

    layer: int
    what: str
    kind: Kind
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """Pages that share a block table."""

    kind: Kind
    pages: tuple[Page, ...]

    def on(self, layers: range, borrowed: int | None = None) -> int:
        """Bytes of a block for those of its pages that are on `layers` (`planning:_project_kv_cache_groups_to_worker`).

        Args:
            borrowed: also those of this layer's caches that others read.
        """
        own = sum(page.bytes for page in self.pages if page.layer in layers)
        if self.kind != "compressed" or borrowed is None:
            return own
        return own + sum(page.bytes for page in self.pages if page.layer == borrowed)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the KV cache is sized for.

    Attributes:
        context: `--max-model-len`.
        batched_tokens: `--max-num-batched-tokens`.
        block_size: `--block-size`.
        speculative_tokens: drafted in each step; 0 without a drafter.
        async_scheduling: vLLM's default: one more batch is in flight than there are stages.
    """

    context: int
    batched_tokens: int = 8_192
    block_size: int = 128
    speculative_tokens: int = 0
    async_scheduling: bool = True

    def in_flight(self, stages: int) -> int:
        """Tokens scheduled and not yet settled (`config/vllm.py:VllmConfig.max_in_flight_tokens`, V2 model runner)."""
        return (stages + self.async_scheduling) * self.batched_tokens


def pages(shape: Shape, size: int, speculative_tokens: int) -> list[Page]:
    """Every layer's pages with blocks of `size` tokens, in the order in which vLLM's layers register them.

    Raises:
        ValueError: the block size is not a multiple of the window's block, and so not of every ratio.
    """
    if size < WINDOW_BLOCK or size % WINDOW_BLOCK:
        raise ValueError(f"the block size is a multiple of {WINDOW_BLOCK}, not {size}")
    found = []
    for layer, ratio in enumerate(shape.ratios):
        found.append(_window(layer))
        if layer not in shape.kv_sources:
            continue
        rows = size // ratio
        found.append(Page(layer, "kv", "compressed", size, _aligned(rows * RECORD_BYTES)))
        if layer in shape.index_sources:
            found.append(Page(layer, "index", "compressed", size, _aligned(rows * INDEX_BYTES)))
        if ratio > 1:
            found.append(_ring(layer, shape, speculative_tokens))
    if speculative_tokens:
        found += [_window(shape.layers + index) for index in range(shape.draft_layers)]
    return found


def _aligned(size: int) -> int:
    """`specs:_apply_alignment_padding`."""
    return -(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def _window(layer: int) -> Page:
    """`v1/attention/backends/mla/sparse_swa.py:DeepseekV4SWACache.get_kv_cache_spec`."""
    return Page(layer, "window", "window", WINDOW_BLOCK, _aligned(WINDOW_BLOCK * RECORD_BYTES))


def _ring(layer: int, shape: Shape, speculative_tokens: int) -> Page:
    """`models/deepseek_v41/compressor.py:CompressorStateCache`: a row of KV and one of scores, float32, for each token."""
    rows = max(_SHORTEST_RING, 1 << (speculative_tokens + 1).bit_length())
    return Page(layer, "ring", "ring", rows, rows * 2 * shape.head_dim * _FLOAT32)


def groups(shape: Shape, traffic: Traffic) -> tuple[Group, ...]:
    """The whole model's groups (`planning:get_kv_cache_groups`, `_get_packed_kv_cache_groups`)."""
    return _groups(shape, traffic.block_size, traffic.speculative_tokens)


@lru_cache(maxsize=256)
def _groups(shape: Shape, block_size: int, speculative_tokens: int) -> tuple[Group, ...]:
    found = pages(shape, block_size, speculative_tokens)
    buckets: dict[Kind, list[Page]] = {}
    for page in found:
        buckets.setdefault(page.kind, []).append(page)
    if len(buckets) == 1:
        return tuple(Group(kind, tuple(bucket)) for kind, bucket in buckets.items())
    repeats = _repeats(list(buckets.values()))
    anchor = max(_narrowest(kind, bucket, repeats) for kind, bucket in buckets.items())
    split: list[Group] = []
    for kind, bucket in buckets.items():
        count = _parts(bucket, repeats)
        if _is_state(kind, repeats):
            each = max(anchor // bucket[0].bytes, 1)
            count = max(count, -(-len(bucket) // each))
        split += [Group(kind, part) for part in _dealt(bucket, count)]
    return tuple(split)


def _sizes(bucket: Sequence[Page]) -> Counter[int]:
    return Counter(page.bytes for page in bucket)


def _balanced(bucket: Sequence[Page]) -> bool:
    return len(set(_sizes(bucket).values())) == 1


def _repeats(buckets: Sequence[Sequence[Page]]) -> int | None:
    """How many times a group repeats the pattern of page sizes; None where no bucket of several sizes is balanced."""
    least = max(
        (max(_sizes(one).values()) for one in buckets if _balanced(one) and len(_sizes(one)) > 1), default=0
    )
    if not least:
        return None
    counts = [max(_sizes(one).values()) for one in buckets if _balanced(one)]
    return _approximate_gcd(counts, least)


def _approximate_gcd(values: Sequence[int], least: int) -> int:
    """The chunk size that wastes the fewest pages; the larger of equals (`planning:_approximate_gcd`)."""
    return min(range(least, max(*values, least) + 1), key=lambda d: (sum(-value % d for value in values), -d))


def _parts(bucket: Sequence[Page], repeats: int | None) -> int:
    if repeats is None or not _balanced(bucket):
        return 1
    return -(-max(_sizes(bucket).values()) // repeats)


def _is_state(kind: Kind, repeats: int | None) -> bool:
    return kind == "ring" or (kind == "window" and repeats is None)


def _narrowest(kind: Kind, bucket: Sequence[Page], repeats: int | None) -> int:
    """Bytes that a block needs for this bucket, however its groups are split."""
    count = len(bucket) if _is_state(kind, repeats) else _parts(bucket, repeats)
    return sum(-(-layers // count) * size for size, layers in _sizes(bucket).items())


def _dealt(bucket: Sequence[Page], count: int) -> list[tuple[Page, ...]]:
    """The pages dealt in turns to `count` groups, one repeat of the pattern at a time."""
    if count == 1:
        return [tuple(bucket)]
    by_size: dict[int, list[Page]] = {}
    for page in bucket:
        by_size.setdefault(page.bytes, []).append(page)
    repeats = list(zip(*by_size.values(), strict=True))
    return [tuple(page for repeat in repeats[index::count] for page in repeat) for index in range(count)]
