"""The layout and the `vllm serve` line to take on some GPUs, or the arithmetic of why there is none and what would do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deepinfer_cli.planner import weights
from deepinfer_cli.serve import memory, partition, reasons
from deepinfer_cli.serve.command import serve_line
from deepinfer_cli.serve.memory import Estimate, Load
from deepinfer_cli.serve.recommend import CONTEXTS, Option, choose, closest, lengths, options, pick

# of one GPU, GB as they are sold; no card of 8.0, 8.6 or 8.9 has more
_SIZES = (24, 32, 40, 48, 80)
# shorter than what is tried where no length is asked for
_SHORT = (16_384, 8_192, 4_096)
# a card of 80 GB may say that it has 79.25 GiB: what is hardly larger is the same card
_LARGER = 1.05
# prompts in smaller pieces: slower to fill in, and smaller activations and reserves
_SMALL_BATCH = 2_048
# the least that may still be called serving, and the most of a card
_TIGHT_BATCH, _TIGHT_SEQUENCES, _TIGHT = 1_024, 16, 0.97


@dataclass(frozen=True, slots=True)
class Advice:
    """What to serve with.

    Attributes:
        best: the layout to take; None where the model does not fit.
        load: what it can serve: context length, speculation.
        line: the command; None where the model does not fit.
        reasons: why this layout, or why none.
        nearest: what would fit, where this does not.
    """

    best: Estimate | None
    load: Load
    line: str | None
    reasons: tuple[str, ...]
    nearest: tuple[str, ...] = ()


def advise(
    gpus: int, gib: float, load: Load | None = None, context: int | None = None, host: float | None = None
) -> Advice:
    """The layout for `gpus` of `gib` GiB each (see `options` and `pick`).

    Args:
        context: the context length that is asked for; default the longest that fits.
        host: GiB of the host's memory, where that is known.
    """
    load = load or Load()
    found = choose(gpus, gib, load, lengths(context), host=host)
    if found.best is not None:
        return advice_of(found.best, gpus, host)
    return _none(found.found, gpus, gib, load, lengths(context))


def advice_of(option: Option, gpus: int, host: float | None = None) -> Advice:
    """The advice to take `option`.

    Args:
        gpus: that there are.
        host: GiB of the host's memory, where that is known.
    """
    found, load = option.estimate, option.load
    line = serve_line(found.layout, load, huge_pages=reasons.huge_pages(found, load, host))
    return Advice(found, load, line, (*reasons.why(found, load, gpus), *reasons.uncertain(found, load)))


def _none(found: Sequence[Option], gpus: int, gib: float, load: Load, contexts: Sequence[int]) -> Advice:
    near = closest(found)
    best, load_near = near.estimate, near.load
    whole = (
        weights.checkpoint(load.model) - (0 if load.engram_on_gpu else weights.tables(load.model))
    ) / memory.GIB
    said = [
        f"{gpus} x {gib:.1f} GiB is {gpus * gib:.0f} GiB; the weights without Engram are {whole:.1f} GiB",
        f"the best layout, at a context of {load_near.context:,}: {best.arithmetic}",
    ]
    if load.engram_on_gpu:
        said[0] = said[0].replace("without", "with")
    if best.fits:
        pool = best.pool
        said.append(
            f"the rest holds {pool.tokens:,} tokens, {pool.concurrency:.2f} requests of {pool.context:,}; "
            f"{load.concurrency:g} are asked for"
        )
    return Advice(None, load_near, None, tuple(said), tuple(what_would(gpus, gib, load, contexts)))


def what_would(
    gpus: int, gib: float, load: Load, contexts: Sequence[int], experts: bool | None = None
) -> Iterator[str]:
    """A vLLM that runs stages, what asks for less, the fewest GPUs of this size, and the smallest size of this many.

    What fills the card comes last.

    Args:
        experts: only with whole experts, or only with slices; None: both.
    """
    asked, *less, tight = _changes(load, contexts, _at_once(gpus, gib, load, contexts))
    here = []
    if experts is not None:
        option = "--expert-parallel" if experts else "--no-expert-parallel"
        here = list(_first([(f"these GPUs without {option}", gpus, gib)], (asked,)))
        yield from here
    if partition.no_stages(load.release):
        newer = replace(load, release=Load().release)
        yield from _first(
            [(f"these GPUs with vLLM {newer.release}", gpus, gib)], (("", newer, tuple(contexts)),), experts
        )
    if not here:
        here = list(_first([("these GPUs", gpus, gib)], less, experts))
        yield from here
    enough = math.ceil(_least(load) / (gib * load.utilization))
    known = _counts(load.release)
    most = min(gpus, known[-1])
    counts = [count for count in known if count > gpus and count >= enough]
    larger = [size for size in _SIZES if size > _LARGER * gib]
    sizes = [size for size in larger if most * size * load.utilization >= _least(load)]
    # more of them that serve no more are no news
    changes = (asked,) if here else (asked, *less[-1:])
    yield from _first([("{} GPUs of this size", count, gib) for count in counts], changes, experts)
    found = list(_first([(f"{{}} GPUs of {size} GB", most, size) for size in sizes], changes, experts))
    if not found:
        machines = sorted((count * size, count, size) for size in larger for count in known if count >= most)
        found += _first(
            [(f"{{}} GPUs of {size} GB", count, float(size)) for _, count, size in machines],
            (asked,),
            experts,
        )
    yield from found
    if not here:
        yield from _first([("these GPUs", gpus, gib)], (tight,), experts)


def without_layout(
    gpus: int,
    gib: float,
    load: Load,
    contexts: Sequence[int],
    expert_parallel: bool | None,
    host: float | None,
) -> str | None:
    """What these GPUs serve as they are, where a layout was asked for that they do not; None where there is nothing."""
    best = choose(gpus, gib, load, contexts, expert_parallel, host).best
    if best is None:
        return None
    needed = best.estimate.host.needed(huge_pages=load.huge_pages) + reasons.HOST_ROOM
    where = ", unchanged" if best.held else f" in a host of {needed:.0f} GiB"
    return f"these GPUs{where}: {_named(best)}"


def _at_once(gpus: int, gib: float, load: Load, contexts: Sequence[int]) -> int:
    """How many requests of the shortest of `contexts` these GPUs hold at once."""
    found = options(gpus, gib, load, [min(contexts)])
    return max(
        (min(int(one.estimate.pool.concurrency), one.load.sequences) for one in found if one.estimate.fits),
        default=0,
    )


def _counts(release: str) -> list[int]:
    """Numbers of GPUs that some layout of `release` takes all of."""
    stages = range(1, partition.most_stages(release) + 1)
    return sorted({tp * pp for tp in memory.TENSOR_PARALLEL for pp in stages})


_Change = tuple[str, Load, tuple[int, ...]]


def _changes(load: Load, contexts: Sequence[int], at_once: int) -> list[_Change]:
    """What is asked for, and what asks for less and less: in words, the load, and the contexts to try.

    Args:
        at_once: requests that these GPUs hold.
    """
    shorter = tuple(one for one in CONTEXTS if one < min(contexts))
    usual = Load().utilization
    small = replace(load, batched_tokens=min(load.batched_tokens, _SMALL_BATCH), concurrency=1.0)
    tight = replace(small, batched_tokens=_TIGHT_BATCH, sequences=_TIGHT_SEQUENCES, speculative=0, vision=False,
                    utilization=max(load.utilization, _TIGHT))  # fmt: skip
    batch = f"--max-num-batched-tokens {small.batched_tokens}"
    flags = (
        f"--gpu-memory-utilization {tight.utilization:g} --max-num-batched-tokens {_TIGHT_BATCH} --max-num-seqs {_TIGHT_SEQUENCES} "
        "--speculative-tokens 0 --no-vision"
    )
    less: list[_Change] = [
        (
            f"--gpu-memory-utilization {usual:g}",
            replace(load, utilization=usual),
            tuple(contexts) if load.utilization < usual else (),
        ),
        ("a shorter context", load, shorter),
        (
            f"--concurrency {at_once}",
            replace(load, concurrency=float(at_once)),
            tuple(contexts) if 0 < at_once < load.concurrency else (),
        ),
        ("one request at a time", replace(load, concurrency=1.0), (*contexts, *shorter)),
        (batch, small, tuple(contexts)),
        ("a shorter context", load, tuple(one for one in _SHORT if one < min(contexts))),
        (f"{batch} and a shorter context" if shorter else batch, small, (*contexts, *shorter)),
    ]
    less = [one for one in less if one[2] and (one[1] != load or one[2] != tuple(contexts))]
    return [("", load, tuple(contexts)), *less, (flags, tight, (*contexts, *shorter))]


def _first(
    machines: Sequence[tuple[str, int, float]], changes: Sequence[_Change], experts: bool | None = None
) -> Iterator[str]:
    """The first machine that serves what is asked for; where none does, the first that serves less.

    In a machine's name `{}` stands for the GPUs that its layout takes.
    """
    for words, load, contexts in changes:
        for name, gpus, gib in machines:
            if (best := pick(options(gpus, gib, load, contexts, experts))) is not None:
                name = name.format(best.estimate.layout.gpus)
                yield f"{name}{f' with {words}' if words else ''}: {_named(best)}"
                return


def _least(load: Load) -> float:
    """GiB of all experts, which no layout holds less than once."""
    return load.model.layers * weights.experts(load.model, load.model.experts) / memory.GIB


def _named(option: Option) -> str:
    hedge = ", within what is uncertain of this estimate" if option.uncertain else ""
    return f"{option.estimate.layout.name}, context {option.load.context:,}{hedge}"
