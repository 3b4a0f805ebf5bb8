"""Pipeline partitions: where stock vLLM can cut DeepSeek-V4.1 between stages, and where it refuses to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from deepinfer_cli.planner.buffers import minor
from deepinfer_cli.planner.shape import FLASH

LAYERS = FLASH.layers
# layers that own a compressed cache; those after one read it until the next (`kv_source_layer_ids`)
KV_SOURCES = FLASH.kv_sources
# a stage may start here: no later layer looks for a cache on an earlier stage, and the stage before has a KV source
CUTS = tuple(cut for cut in FLASH.cuts if cut > KV_SOURCES[0])
BEGINNINGS = ", ".join(map(str, CUTS))
MAX_STAGES = len(CUTS) + 1
VARIABLE = "VLLM_PP_LAYER_PARTITION"
_PUBLISHED = (14, 14, 12)
_SAME_LAYOUTS = "at the start that all stages know the same KV cache layouts (v1/attention/backends/utils.py, resolve_kv_cache_layout)"
# 0.33 is the first to hand token ids to the stages after the first
_TOKEN_IDS_SINCE = 33


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether vLLM 0.30 to 0.33 builds the model in these stages, and does not refuse their caches at the start.

    Attributes:
        partition: layers of each stage.
        legal: it does.
        reason: why not, or that it does.
        nearest: the legal partition with the same number of stages that moves the cuts least; None where none is needed
            or there is none.
    """

    partition: tuple[int, ...]
    legal: bool
    reason: str
    nearest: tuple[int, ...] | None = None


def parse(text: str) -> tuple[int, ...]:
    """`14,14,12` as numbers.

    Raises:
        ValueError: it is not a list of whole numbers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no list of layers for each stage, such as 20,20") from None


def text(partition: Sequence[int]) -> str:
    """As vLLM's variable has it: `20,20`."""
    return ",".join(map(str, partition))


def no_stages(release: str) -> str | None:
    """Why `release` runs no pipeline of this model, whatever its partition; None where it does."""
    if minor(release) >= _TOKEN_IDS_SINCE:
        return None
    return (
        f"vLLM {release} runs no pipeline of this model: before 0.33 stages after the first are given no token ids, and the "
        'first step ends with "ValueError: DeepSeek V4 vision MoE routing requires input_ids." (models/deepseek_v4/nvidia/model.py)'
    )


def most_stages(release: str) -> int:
    """The most stages that `release` runs."""
    return 1 if no_stages(release) else MAX_STAGES


def cuts(partition: Sequence[int]) -> tuple[int, ...]:
    """The first layer of each stage but the first."""
    starts, layer = [], 0
    for count in partition[:-1]:
        layer += count
        starts.append(layer)
    return tuple(starts)


def even(stages: int) -> tuple[int, ...]:
    """What vLLM takes where the variable is not set: equal stages, what is left over one by one from the last but one."""
    sizes = [LAYERS // stages] * stages
    for place in range(LAYERS % stages):
        sizes[-(place + 2)] += 1
    return tuple(sizes)


@lru_cache
def legal(stages: int) -> tuple[tuple[int, ...], ...]:
    """Every partition into `stages` that vLLM builds and starts, the most even first."""
    found = []
    for chosen in combinations(CUTS, stages - 1):
        ends = (*chosen, LAYERS)
        found.append(tuple(end - start for start, end in zip((0, *chosen), ends, strict=True)))
    return tuple(sorted(found, key=lambda sizes: (max(sizes), -min(sizes), sizes)))


def check(partition: Sequence[int], stages: int | None = None) -> Verdict:
    """What vLLM 0.30 to 0.33 says to `partition` for `stages` (default: as many as it has)."""
    given = tuple(partition)
    count = len(given) if stages is None else stages
    if len(given) != count:
        return _refused(given, f"it has {len(given)} stages, the pipeline has {count}", count)
    if min(given) < 1:
        return _refused(given, "a stage has no layer", count)
    if sum(given) != LAYERS:
        return _refused(given, f"its layers add up to {sum(given)}, the model has {LAYERS}", count)
    if not _wrong(given):
        return Verdict(given, True, f"{text(given)} cuts where no layer needs an earlier stage's cache")
    named = " (the published layout of six GPUs, TP2 x PP3)" if given == _PUBLISHED else ""
    reasons = "; and ".join(why for why in (_inside(given), _bare(given)) if why)
    return _refused(given, f"{text(given)}{named}: {reasons}", count)


def _inside(partition: Sequence[int]) -> str | None:
    """What is said of cuts between a KV source and a layer that reads its cache."""
    found = _shared(partition)
    if not found:
        return None
    where = "; ".join(
        f"the cut before layer {cut} is inside the group of layer {_source(cut)}" for cut in found
    )
    return (
        f"{where}, whose KV cache its layers share, and vLLM 0.30 to 0.33 raises NotImplementedError there; it needs a vLLM "
        f"that relays or replicates the caches of layer {' and '.join(map(str, relayed(partition)))}"
    )


def _bare(partition: Sequence[int]) -> str | None:
    """What is said of a first stage that ends before the first KV source: it has sliding windows alone."""
    first = next(iter(cuts(partition)), LAYERS)
    if first > KV_SOURCES[0]:
        return None
    return f"the cut before layer {first} makes a first stage without a KV source: vLLM 0.30 to 0.33 asserts {_SAME_LAYOUTS}"


def too_many() -> str:
    """Why no more than `MAX_STAGES` stages start."""
    return (
        f"stages can begin at layers {BEGINNINGS} only, so there are at most {MAX_STAGES}: a first stage of one "
        f"or two layers has no KV source, and vLLM 0.30 to 0.33 asserts {_SAME_LAYOUTS}"
    )


def short(partition: Sequence[int]) -> str | None:
    """What `check` says against whole partitions, in a few words; None where it says nothing."""
    if len(partition) > MAX_STAGES:
        return f"it has {len(partition)} stages, and at most {MAX_STAGES} start"
    wrong = _wrong(partition)
    if not wrong:
        return None
    return f"no stage can begin at layer {' or '.join(map(str, wrong))}: at {BEGINNINGS} only"


def relayed(partition: Sequence[int]) -> tuple[int, ...]:
    """The KV sources whose caches a stage after theirs reads: stock does not relay them, nor hold them twice."""
    return tuple(sorted({_source(cut) for cut in _shared(partition)}))


def _shared(partition: Sequence[int]) -> list[int]:
    """The cuts after which a layer reads a cache of an earlier stage."""
    return [cut for cut in _wrong(partition) if cut > KV_SOURCES[0]]


def _wrong(partition: Sequence[int]) -> list[int]:
    """The cuts where no stage may start."""
    return [cut for cut in cuts(partition) if cut not in CUTS]


def _refused(given: tuple[int, ...], reason: str, stages: int) -> Verdict:
    return Verdict(given, False, reason, nearest(given, stages))


def nearest(partition: Sequence[int], stages: int) -> tuple[int, ...] | None:
    """The legal partition into `stages` whose cuts are nearest to those of `partition`; None with too many stages."""
    return next(iter(by_distance(partition, stages)), None)


def by_distance(partition: Sequence[int], stages: int) -> list[tuple[int, ...]]:
    """The legal partitions into `stages`, those whose cuts are nearest to those of `partition` first, else the most even."""
    wanted = cuts(partition)
    if len(wanted) != stages - 1 or min(partition) < 1:
        return list(legal(stages))

    def moved(one: tuple[int, ...]) -> int:
        return sum(abs(a - b) for a, b in zip(cuts(one), wanted, strict=True))

    return sorted(legal(stages), key=moved)


def _source(layer: int) -> int:
    return max(source for source in KV_SOURCES if source <= layer)
