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
# a stage may start here: a layer whose cache no later layer looks for on an earlier stage. Layers 0 and 1 have none
CUTS = FLASH.cuts
MAX_STAGES = len(CUTS) + 1
ENGRAM_LAYERS = FLASH.engram.layers
VARIABLE = "VLLM_PP_LAYER_PARTITION"
_PUBLISHED = (14, 14, 12)
# layouts of several pipeline stages are recommended. True needs a run on GPUs, of the overlay as it is, in which a pipeline
# answers as one stage does: prompts and decodes in one step, replay, and preemption (docs/03_VALIDATION.md)
STAGES_SHOWN = False
NOT_SHOWN = (
    "pipeline stages are not shown to work with the overlay: on two H200, 0.33.0 started them and failed at the first step of "
    "prompts and decodes together; mended since, not run again (docs/03_VALIDATION.md)"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether stock vLLM 0.30 to 0.33 builds the model in these stages.

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


def shown(stages: int) -> bool:
    """That many stages are shown to work, and so may be recommended."""
    return STAGES_SHOWN or stages == 1


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
    """Every partition into `stages` that stock vLLM builds, the most even first."""
    found = []
    for chosen in combinations(CUTS, stages - 1):
        ends = (*chosen, LAYERS)
        found.append(tuple(end - start for start, end in zip((0, *chosen), ends, strict=True)))
    return tuple(sorted(found, key=lambda sizes: (max(sizes), -min(sizes), sizes)))


def check(partition: Sequence[int], stages: int | None = None) -> Verdict:
    """What stock vLLM 0.30 to 0.33 says to `partition` for `stages` (default: as many as it has)."""
    given = tuple(partition)
    count = len(given) if stages is None else stages
    if len(given) != count:
        return _refused(given, f"it has {len(given)} stages, the pipeline has {count}", count)
    if min(given) < 1:
        return _refused(given, "a stage has no layer", count)
    if sum(given) != LAYERS:
        return _refused(given, f"its layers add up to {sum(given)}, the model has {LAYERS}", count)
    inside = [cut for cut in cuts(given) if cut not in CUTS]
    if not inside:
        return Verdict(given, True, f"{text(given)} cuts where no layer needs an earlier stage's cache")
    reason = "; ".join(
        f"the cut before layer {cut} is inside the group of layer {_source(cut)}" for cut in inside
    )
    named = " (the published layout of six GPUs, TP2 x PP3)" if given == _PUBLISHED else ""
    return _refused(
        given,
        f"{text(given)}{named}: {reason}, whose KV cache its layers share, and vLLM 0.30 to 0.33 raises "
        f"NotImplementedError there; it needs a vLLM that relays or replicates the caches of layer "
        f"{' and '.join(map(str, relayed(given)))}",
        count,
    )


def skipped_engram(partition: Sequence[int], release: str) -> tuple[int, ...]:
    """The Engram layers that `release` passes over without a word: those after the first stage, before 0.33.

    Engram hashes the token ids, and until 0.32 the runner hands stages after the first none (`model_inputs["input_ids"]`).
    """
    if minor(release) >= 33:
        return ()
    return tuple(layer for layer in ENGRAM_LAYERS if layer >= partition[0])


def relayed(partition: Sequence[int]) -> tuple[int, ...]:
    """The KV sources whose caches a stage after theirs reads: stock does not relay them, nor hold them twice."""
    found = {_source(cut) for cut in cuts(partition) if cut > KV_SOURCES[0] and cut not in CUTS}
    return tuple(sorted(found))


def _refused(given: tuple[int, ...], reason: str, stages: int) -> Verdict:
    return Verdict(given, False, reason, nearest(given, stages))


def nearest(partition: Sequence[int], stages: int) -> tuple[int, ...] | None:
    """The legal partition into `stages` whose cuts are nearest to those of `partition`; None with too many stages."""
    choices = legal(stages)
    if not choices:
        return None
    wanted = cuts(partition)
    if len(wanted) != stages - 1:
        return choices[0]
    return min(choices, key=lambda one: sum(abs(a - b) for a, b in zip(cuts(one), wanted, strict=True)))


def _source(layer: int) -> int:
    return max(source for source in KV_SOURCES if source <= layer)
