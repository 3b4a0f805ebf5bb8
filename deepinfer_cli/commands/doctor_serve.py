"""The rows of `deepinfer doctor` on serving: the layout, and the line to serve with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_cli.commands.doctor_row import Row, Status
from deepinfer_cli.detect import host
from deepinfer_cli.detect.gpu import Gpu, GpuReport
from deepinfer_cli.detect.target import Target
from deepinfer_cli.serve import memory, partition, recommend, settings
from deepinfer_cli.serve.memory import Layout, Load
from deepinfer_cli.serve.recommend import Advice


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants looked at: a command line, a layout, a context length."""

    serve: str | None = None
    tp: int | None = None
    pp: int | None = None
    partition: str | None = None
    context: int | None = None

    @property
    def given(self) -> str | None:
        """The partition, from the option or the environment."""
        return self.partition if self.partition is not None else os.environ.get(partition.VARIABLE)


def partition_rows(given: str | None, found: list[settings.Finding]) -> Iterator[Row]:
    """That a partition is well, where nothing else was found about it."""
    if given is not None and not any(partition.VARIABLE in one.name for one in found):
        yield Row("partition", "ok", partition.check(partition.parse(given)).reason)


def advice_rows(target: Target | None, gpus: GpuReport, asked: Asked, keep: list[Advice]) -> Iterator[Row]:
    """The layout to serve with, or why there is none; the advice itself is put into `keep`."""
    cards = _usable(gpus)
    if not cards:
        yield Row("serving", "ok", "no SM8x card to plan for")
        return
    gib = min(card.memory_bytes or 0 for card in cards) / memory.GIB
    if not gib:
        yield Row("serving", "note", "the memory of a card cannot be read: nothing to plan with")
        return
    load = Load(release=release_of(target))
    yield from _asked_layout(asked, gib, load, len(cards))
    advice = recommend.advise(len(cards), gib, load, asked.context)
    keep.append(advice)
    if advice.best is None:
        # the machine is what it is; an estimate is no fault of it
        yield Row("serving", "note", "the model does not fit: " + "; ".join(advice.reasons),
                  "it would fit: " + "; or ".join(advice.nearest) if advice.nearest else "")  # fmt: skip
        return
    yield from _host(load)
    yield Row(
        "serving",
        "ok",
        f"{advice.best.layout.name}, context {advice.load.context:,} (an estimate)",
        "the line is below",
    )
    for number, reason in enumerate(advice.reasons, 1):
        yield Row(f"serving, {number}", "ok", reason)


def _asked_layout(asked: Asked, gib: float, load: Load, cards: int) -> Iterator[Row]:
    if asked.tp is None and asked.pp is None and asked.given is None:
        return
    try:
        sizes = partition.parse(asked.given) if asked.given is not None else partition.even(asked.pp or 1)
    except ValueError:
        return
    if not partition.check(sizes).legal:
        sizes = partition.check(sizes).nearest or (partition.LAYERS,)
    layout = Layout(
        asked.tp or max((tp for tp in memory.TENSOR_PARALLEL if tp * len(sizes) <= cards), default=1), sizes
    )
    if layout.tp not in memory.TENSOR_PARALLEL:
        return
    wanted = Load(load.release, asked.context or recommend.CONTEXTS[-1], speculative=layout.pp == 1)
    found = memory.estimate(layout, gib, wanted)
    room = f"the rest holds {found.tokens:,} tokens" if found.tokens else "it does not fit"
    few = f"; it takes {layout.gpus} GPUs, {cards} are visible" if layout.gpus > cards else ""
    fits = found.tokens >= wanted.context and layout.gpus <= cards
    yield Row(f"layout {layout.name}", "ok" if fits else "note",
              f"{found.arithmetic}, at a context of {wanted.context:,}; {room}{few}")  # fmt: skip


def _host(load: Load) -> Iterator[Row]:
    total = host.memory_bytes()
    if total is None or load.engram_on_gpu:
        return
    gib = total / memory.GIB
    text = f"{gib:.0f} GiB; Engram's tables take {memory.ENGRAM} GiB of it, pinned"
    if gib < memory.ENGRAM:
        yield Row(
            "host memory",
            "problem",
            text,
            f"{memory.ENGRAM:.0f} GiB and room for the rest, or Engram on the GPUs",
        )
    else:
        yield Row("host memory", "note" if gib < memory.ENGRAM + 32 else "ok", text)


def _usable(gpus: GpuReport) -> list[Gpu]:
    """The served cards that CUDA_VISIBLE_DEVICES leaves, of the architecture that most of them have."""
    cards = [gpu for gpu in gpus.gpus if gpu.served and not gpu.mig]
    if gpus.visible is not None:
        names = [name.strip() for name in gpus.visible.split(",")]
        cards = [
            gpu for gpu in cards if str(gpu.index) in names or any(gpu.uuid.startswith(n) for n in names if n)
        ]
    kinds = [gpu.capability for gpu in cards]
    return [gpu for gpu in cards if gpu.capability == max(kinds, key=kinds.count)]


def release_of(target: Target | None) -> str:
    """The vLLM release to plan for."""
    return (target.version if target else None) or Load().release


def advice_data(advice: Advice) -> dict[str, Any]:
    """The advice for the JSON document."""
    best = advice.best
    status: Status = "ok" if best else "note"
    return {
        "status": status,
        "line": advice.line,
        "reasons": list(advice.reasons),
        "nearest": list(advice.nearest),
        "load": asdict(advice.load),
        "layout": best
        and {
            "name": best.layout.name,
            "tensor_parallel": best.layout.tp,
            "partition": list(best.layout.partition),
            "expert_parallel": best.layout.expert_parallel,
            "tokens": best.tokens,
            "usable_gib": round(best.usable, 2),
            "stages": [
                {name: round(value, 2) for name, value in stage.parts.items()} for stage in best.stages
            ],
        },
    }
