"""Which layouts some GPUs can serve, with which context, and which of them to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from deepinfer_cli.serve import memory, partition, reasons
from deepinfer_cli.serve.memory import Estimate, Layout, Load

CONTEXTS = (1_048_576, 524_288, 262_144, 131_072, 65_536, 32_768)
# a context that is worth whole experts
_LONG = 262_144


@dataclass(frozen=True, slots=True)
class Option:
    """A layout with the longest context that it serves; with the shortest that was asked for where it serves none.

    Attributes:
        load: with no more sequences than can decode inside what vLLM counts.
        held: the host has the memory for it, as far as that is known.
    """

    estimate: Estimate
    load: Load
    held: bool = True

    @property
    def serves(self) -> bool:
        """It does, by the numbers."""
        return self.estimate.serves(self.load.concurrency) and not self.few

    @property
    def few(self) -> bool:
        """Fewer sequences may decode at once than are asked for."""
        return self.load.sequences < self.load.concurrency

    @property
    def uncertain(self) -> bool:
        """It serves by less than what is uncertain of the estimate."""
        return self.serves and any(reasons.uncertain(self.estimate, self.load))


@dataclass(frozen=True, slots=True)
class Choice:
    """What was found: all options, the one to take (None where there is none), and the load, which may have Engram moved."""

    found: list[Option]
    best: Option | None
    load: Load


# the options with a load, and the one of them to take
Finder = Callable[[Load], tuple[list[Option], Option | None]]


def choose(
    gpus: int,
    gib: float,
    load: Load,
    contexts: Sequence[int],
    expert_parallel: bool | None = None,
    host: float | None = None,
) -> Choice:
    """The one choice of `plan` and `doctor`: `pick` of `options`, with Engram where there is room for it.

    Args:
        host: GiB of the host's memory, where that is known.
    """

    def find(tried: Load) -> tuple[list[Option], Option | None]:
        found = options(gpus, gib, tried, contexts, expert_parallel)
        return found, pick(found)

    return with_host(find, load, host)


def with_host(find: Finder, load: Load, host: float | None) -> Choice:
    """What `find` finds; where the host has no room for Engram's tables, what it finds with them on the GPUs.

    Where they do not fit there either, the options are marked (`Option.held`), and the best is one that is not held.
    """
    found, best = find(load)
    if best is None or reasons.host_holds(best.estimate, best.load, host):
        return Choice(found, best, load)
    moved = replace(load, engram_on_gpu=True)
    there, instead = find(moved)
    if instead is not None and reasons.host_holds(instead.estimate, instead.load, host):
        return Choice(there, instead, moved)
    marked = [replace(one, held=reasons.host_holds(one.estimate, one.load, host)) for one in found]
    return Choice(marked, marked[found.index(best)], load)


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
        for stages in range(1, partition.most_stages(release) + 1):
            if tp * stages > gpus:
                break
            for sizes in partition.legal(stages):
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
    """The option to take; None where none serves.

    Fewest stages first, for each stage is one more hop of every token; then as many GPUs as it can use; then the longest
    context that the pool holds as often as asked; expert parallelism only where slices of every expert do not fit.
    """
    serving = [one for one in found if one.serves]
    return min(serving, key=rank) if serving else None


def longer(found: Sequence[Option], best: Option) -> Option | None:
    """The option to take for the longest context, where `best` has a shorter one."""
    most = max(one.load.context for one in found if one.serves)
    if most == best.load.context:
        return None
    return pick([one for one in found if one.held and one.load.context == most])


def closest(found: Sequence[Option]) -> Option:
    """Where none is to be taken, the one that lacks the least."""
    return max(found, key=value)


def longest(layout: Layout, gib: float, load: Load, contexts: Sequence[int]) -> Option:
    """The layout with the longest of `contexts` that it serves; with the shortest where it serves none."""
    # no release of 0.30 to 0.33 relays the drafter's inputs between stages; what is not stock is taken to do it
    load = replace(load, speculative=load.speculative if layout.pp == 1 or not layout.stock else 0)
    last = _inside(layout, gib, replace(load, context=min(contexts)))
    if not last.serves:
        return last
    for context in sorted(contexts, reverse=True)[:-1]:
        found = _inside(layout, gib, replace(load, context=context))
        if found.serves:
            return found
    return last


def _inside(layout: Layout, gib: float, load: Load) -> Option:
    """The layout with as many sequences of `load` as vLLM counts the decode logits of."""
    found = memory.estimate(layout, gib, load)
    while (most := reasons.sequences_inside(found, load)) < load.sequences:
        load = replace(load, sequences=most)
        found = memory.estimate(layout, gib, load)
    return Option(found, load)


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
