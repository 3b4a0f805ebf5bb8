"""Which layouts some GPUs can serve, with which context, and which of them to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deepinfer_cli.serve import memory, partition
from deepinfer_cli.serve.memory import Estimate, Layout, Load

CONTEXTS = (1_048_576, 524_288, 262_144, 131_072, 65_536, 32_768)
# a context that is worth whole experts
_LONG = 262_144


@dataclass(frozen=True, slots=True)
class Option:
    """A layout with the longest context that it serves; with the shortest that was asked for where it serves none."""

    estimate: Estimate
    load: Load

    @property
    def serves(self) -> bool:
        """It does, by the numbers."""
        return self.estimate.serves(self.load.concurrency)

    @property
    def shown(self) -> bool:
        """Its stages are shown to work, and so it may be recommended."""
        return partition.shown(self.estimate.layout.pp)


def lengths(context: int | None) -> tuple[int, ...]:
    """The context lengths to try, longest first."""
    return CONTEXTS if context is None else (context,)


def layouts(gpus: int, release: str, expert_parallel: bool | None = None) -> Iterator[Layout]:
    """Every layout of at most `gpus` that `release` runs right.

    Args:
        expert_parallel: only with whole experts, or only with slices; None: both where slices are padded.
    """
    for tp in memory.TENSOR_PARALLEL:
        kinds: tuple[bool, ...] = (False,) if expert_parallel is None or tp == 1 else (expert_parallel,)
        if expert_parallel is None and memory.expert_padding(Layout(tp)) > 1:
            kinds = (False, True)
        for stages in range(1, partition.MAX_STAGES + 1):
            if tp * stages > gpus:
                break
            for sizes in partition.legal(stages):
                if not partition.skipped_engram(sizes, release):
                    yield from (Layout(tp, sizes, expert_parallel=whole) for whole in kinds)


def options(
    gpus: int,
    gib: float,
    load: Load,
    contexts: Sequence[int],
    expert_parallel: bool | None = None,
) -> list[Option]:
    """Of each number of GPUs a stage, of stages and kind of experts the partition that serves the most."""
    kinds: dict[tuple[int, int, bool], Option] = {}
    for layout in layouts(gpus, load.release, expert_parallel):
        found = longest(layout, gib, load, contexts)
        kind = (layout.tp, layout.pp, layout.expert_parallel)
        if kind not in kinds or value(found) > value(kinds[kind]):
            kinds[kind] = found
    return list(kinds.values())


def pick(found: Sequence[Option]) -> Option | None:
    """The option to take; None where none serves that is shown to work.

    Fewest stages first, for each stage is one more hop of every token; then as many GPUs as it can use; then the longest
    context that the pool holds as often as asked; expert parallelism only where slices of every expert do not fit.
    """
    serving = [one for one in found if one.serves and one.shown]
    return min(serving, key=rank) if serving else None


def closest(found: Sequence[Option]) -> Option:
    """Where none is to be taken, the one that lacks the least."""
    return max((one for one in found if one.shown), key=value)


def unshown(found: Sequence[Option]) -> Option | None:
    """The best that only stages that are not shown to work keep from being taken."""
    waiting = [one for one in found if one.serves and not one.shown]
    return min(waiting, key=rank) if waiting else None


def longest(layout: Layout, gib: float, load: Load, contexts: Sequence[int]) -> Option:
    """The layout with the longest of `contexts` that it serves; with the shortest where it serves none."""
    # no release of 0.30 to 0.33 relays the drafter's inputs between stages; what is not stock is taken to do it
    load = replace(load, speculative=load.speculative if layout.pp == 1 or not layout.stock else 0)
    least = replace(load, context=min(contexts))
    last = Option(memory.estimate(layout, gib, least), least)
    if not last.serves:
        return last
    for context in sorted(contexts, reverse=True)[:-1]:
        fitted = replace(load, context=context)
        found = Option(memory.estimate(layout, gib, fitted), fitted)
        if found.serves:
            return found
    return last


def value(option: Option) -> tuple[float, ...]:
    """What makes one partition of a layout better than another: it serves, longer contexts, more tokens, more room."""
    found = option.estimate
    room = min(found.usable - stage.total for stage in found.stages)
    return (option.serves, option.load.context if option.serves else 0, found.tokens, room)


def rank(option: Option) -> tuple[float, ...]:
    """The order of `pick`: the lowest first."""
    layout, load = option.estimate.layout, option.load
    short = load.context < _LONG
    return (layout.pp, -layout.tp, short, layout.expert_parallel, -load.context, -option.estimate.tokens)
