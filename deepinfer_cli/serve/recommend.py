"""The layout and the `vllm serve` line for some GPUs, or the arithmetic of why there is none and what would do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepinfer_cli.serve import memory, partition
from deepinfer_cli.serve.memory import Estimate, Layout, Load

MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"
CONTEXTS = (1_048_576, 524_288, 262_144, 131_072, 65_536, 32_768)
DRAFT_TOKENS = 5
BLOCK_SIZE = 128
# of one GPU, GB as they are sold
_SIZES = (24, 32, 40, 48, 64, 80, 96, 141)
_MOST_GPUS = 48
_WIDTH = "experts as wide as Marlin pads them"


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


def advise(gpus: int, gib: float, load: Load | None = None, context: int | None = None) -> Advice:
    """The layout for `gpus` of `gib` GiB each.

    Fewest stages first, for each stage is one more hop of every token; then as many GPUs as it can use; then the longest
    context that the pool holds at least once; expert parallelism only where slices of every expert do not fit.

    Args:
        context: the context length that is asked for; default the longest that fits.
    """
    load = load or Load()
    lengths = CONTEXTS if context is None else (context,)
    found = [
        (one, fitted)
        for layout in layouts(gpus, load.release)
        for one, fitted in [_longest(layout, gib, load, lengths)]
        if one is not None
    ]
    if not found:
        return _none(gpus, gib, load, lengths)
    best, fitted = min(found, key=lambda item: _rank(*item))
    return Advice(best, fitted, serve_line(best.layout, fitted), tuple(_why(best, fitted, gpus)))


def layouts(gpus: int, release: str) -> Iterator[Layout]:
    """Every layout of at most `gpus` that `release` runs right; with more than one GPU a stage, both kinds of experts."""
    for tp in memory.TENSOR_PARALLEL:
        for stages in range(1, partition.MAX_STAGES + 1):
            if tp * stages > gpus:
                break
            for sizes in partition.legal(stages):
                if partition.skipped_engram(sizes, release):
                    continue
                yield Layout(tp, sizes)
                if tp > 1:
                    yield Layout(tp, sizes, expert_parallel=True)


def serve_line(layout: Layout, load: Load) -> str:
    """The command, for vLLM 0.30 to 0.33; what is not vLLM's default is said, and what must not change by itself."""
    options: list[tuple[str, str | None]] = [("--tensor-parallel-size", str(layout.tp))]
    if layout.pp > 1:
        options.append(("--pipeline-parallel-size", str(layout.pp)))
    if layout.expert_parallel:
        options.append(("--enable-expert-parallel", None))
    options += [
        ("--block-size", str(BLOCK_SIZE)),
        ("--kv-cache-dtype", "fp8"),
        ("--moe-backend", "marlin"),
        ("--max-model-len", str(load.context)),
        ("--max-num-batched-tokens", str(load.batched_tokens)),
        ("--gpu-memory-utilization", f"{load.utilization:g}"),
        ("--engram-config", json.dumps({"cpu_offload": not load.engram_on_gpu})),
    ]
    if load.speculative:
        options.append(
            ("--speculative-config", json.dumps({"method": "dspark", "num_speculative_tokens": DRAFT_TOKENS}))
        )
    words = [word for name, value in options for word in (name, value) if word is not None]
    before = f"{partition.VARIABLE}={partition.text(layout.partition)} " if layout.pp > 1 else ""
    return before + shlex.join(["vllm", "serve", MODEL, *words])


def _longest(
    layout: Layout, gib: float, load: Load, lengths: tuple[int, ...]
) -> tuple[Estimate | None, Load]:
    # no release of 0.30 to 0.33 relays the drafter's inputs between stages
    load = replace(load, speculative=load.speculative and layout.pp == 1)
    for length in lengths:
        fitted = replace(load, context=length)
        found = memory.estimate(layout, gib, fitted)
        if found.tokens >= length:
            return found, fitted
    return None, load


def _rank(found: Estimate, load: Load) -> tuple[int, ...]:
    layout = found.layout
    return (layout.pp, -layout.tp, -load.context if load.context < CONTEXTS[2] else 0, layout.expert_parallel,
            -load.context, -found.tokens)  # fmt: skip


def _why(best: Estimate, load: Load, gpus: int) -> Iterator[str]:
    layout = best.layout
    yield f"{best.arithmetic}; the rest holds {best.tokens:,} tokens, {best.tokens / load.context:.1f} x {load.context:,}"
    padding = memory.expert_padding(layout)
    if padding > 1:
        yield (
            f"TP{layout.tp} slices an expert's width {memory.EXPERT_WIDTH:,} into {memory.EXPERT_WIDTH // layout.tp}, "
            f"which Marlin pads: {100 * (padding - 1):.0f} % more to hold and to read; --enable-expert-parallel keeps "
            "experts whole, and is not tested with the overlay"
        )
    if layout.expert_parallel:
        yield "slices of every expert, padded by Marlin, do not fit or leave less: experts whole; not tested with the overlay"
    if layout.pp > 1:
        yield (
            "each stage is one more hop for every token, and no DSpark: vLLM 0.30 to 0.33 refuses it for this model "
            "with pipeline stages"
        )
    if layout.gpus < gpus:
        yield (
            f"{gpus - layout.gpus} of {gpus} GPUs are left over: 64 heads are split by 1, 2, 4 or 8, and stages begin "
            f"at layers {_cuts()} only"
        )
    if not load.engram_on_gpu:
        yield f"Engram's tables, {memory.ENGRAM} GiB, are in the host's memory"


def _none(gpus: int, gib: float, load: Load, lengths: tuple[int, ...]) -> Advice:
    shortest = replace(load, context=min(lengths))
    tried = [
        memory.estimate(layout, gib, replace(shortest, speculative=False))
        for layout in layouts(gpus, load.release)
    ]
    closest = min(tried, key=lambda one: one.stages[one.tightest].total)
    whole = memory.CHECKPOINT - (0 if load.engram_on_gpu else memory.ENGRAM)
    reasons = [
        f"{gpus} x {gib:.1f} GiB is {gpus * gib:.0f} GiB; the weights without Engram are {whole:.1f} GiB",
        f"the best layout, without DSpark, at a context of {shortest.context:,}: {closest.arithmetic}",
    ]
    return Advice(None, shortest, None, tuple(reasons), tuple(_what_would(gpus, gib, load, lengths)))


def _what_would(gpus: int, gib: float, load: Load, lengths: tuple[int, ...]) -> Iterator[str]:
    """The fewest GPUs of this size, and the smallest size of this many."""
    more = next((n for n in range(gpus + 1, _MOST_GPUS + 1) if _fits(n, gib, load, lengths)), None)
    if more:
        yield f"{more} GPUs of this size: {_fits(more, gib, load, lengths)}"
    size = next((size for size in _SIZES if size > gib and _fits(gpus, size, load, lengths)), None)
    if size:
        yield f"{gpus} GPUs of {size} GB: {_fits(gpus, size, load, lengths)}"


def _fits(gpus: int, gib: float, load: Load, lengths: tuple[int, ...]) -> str | None:
    found = [
        (one, fitted)
        for layout in layouts(gpus, load.release)
        for one, fitted in [_longest(layout, gib, load, lengths)]
        if one is not None
    ]
    if not found:
        return None
    best, fitted = min(found, key=lambda item: _rank(*item))
    return f"{best.layout.name}, context {fitted.context:,}"


def _cuts() -> str:
    return ", ".join(map(str, partition.CUTS))
