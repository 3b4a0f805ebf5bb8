"""The rows of `deepinfer doctor` on serving: the layout, and the line to serve with."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from deepinfer_cli.commands.doctor_row import Row, Status
from deepinfer_cli.detect import host
from deepinfer_cli.detect.gpu import Gpu, GpuReport
from deepinfer_cli.detect.target import Target
from deepinfer_cli.planner import kv
from deepinfer_cli.serve import memory, partition, reasons, recommend, settings
from deepinfer_cli.serve.advice import Advice, advice_of, advise
from deepinfer_cli.serve.memory import Estimate, Layout, Load
from deepinfer_cli.serve.recommend import Option


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
        sizes = partition.parse(given)
        load = Load()
        alone = kv.missing(load.model, sizes, load.traffic)
        mended = (
            "; stock vLLM does not start these stages, the overlay's op `pipeline` makes them start"
            if alone
            else ""
        )
        yield Row("partition", "ok", partition.check(sizes).reason + mended)


def advice_rows(target: Target | None, gpus: GpuReport, asked: Asked, keep: list[Advice]) -> Iterator[Row]:
    """The layout to serve with, or why there is none; the advice itself is put into `keep`.

    A layout that is asked for and that serves is the one that is advised, if this vLLM runs it.
    """
    cards = usable(gpus)
    if not cards:
        yield Row("serving", "ok", "no SM8x card to plan for")
        return
    gib = min(card.memory_bytes or 0 for card in cards) / memory.GIB
    if not gib:
        yield Row("serving", "note", "the memory of a card cannot be read: nothing to plan with")
        return
    load, room = Load(release=release_of(target)), _host_gib()
    advice = None
    if asked.tp is not None or asked.pp is not None or asked.given is not None:
        wanted = yield from _asked_layout(asked, gib, load, len(cards), room)
        advice = wanted and advice_of(wanted, len(cards), room)
    advice = advice or advise(len(cards), gib, load, asked.context, room)
    keep.append(advice)
    if advice.best is None:
        # the machine is what it is; an estimate is no fault of it
        yield Row("serving", "note", "the model does not fit: " + "; ".join(advice.reasons),
                  "it would fit: " + "; or ".join(advice.nearest) if advice.nearest else "")  # fmt: skip
        return
    short = yield from _host(advice.best, advice.load, room)
    yield Row(
        "serving",
        "note" if short else "ok",
        f"{advice.best.layout.name}, context {advice.load.context:,} (an estimate)"
        + ("; the GPUs hold it, the host's memory does not" if short else ""),
        "the line is below",
    )
    for number, reason in enumerate(advice.reasons, 1):
        yield Row(f"serving, {number}", "ok", reason)


def _asked_layout(
    asked: Asked, gib: float, load: Load, cards: int, host_gib: float | None
) -> Generator[Row, None, Option | None]:
    """What is to say about the layout that is asked for; returns it where it serves."""
    try:
        sizes = partition.parse(asked.given) if asked.given is not None else partition.even(asked.pp or 1)
    except ValueError:
        return None
    verdict = partition.check(sizes, asked.pp)
    if not verdict.legal and verdict.nearest is None:
        yield Row(f"layout PP{asked.pp or len(sizes)}", "note", verdict.reason,
                  f"at most {partition.MAX_STAGES} stages")  # fmt: skip
        return None
    sizes = sizes if verdict.legal else verdict.nearest or sizes
    tp = asked.tp or max((tp for tp in memory.TENSOR_PARALLEL if tp * len(sizes) <= cards), default=1)
    if tp not in memory.TENSOR_PARALLEL:
        return None
    contexts = recommend.lengths(asked.context)

    def find(tried: Load) -> tuple[list[Option], Option | None]:
        one = recommend.longest(Layout(tp, sizes), gib, tried, contexts)
        return [one], one if one.serves else None

    found = recommend.with_host(find, load, host_gib).found[0]
    layout, one = found.estimate.layout, found.estimate
    room = f"the rest holds {one.tokens:,} tokens" if one.tokens else "it does not fit"
    few = f"; it takes {layout.gpus} GPUs, {cards} are visible" if layout.gpus > cards else ""
    why = partition.no_stages(load.release) if layout.pp > 1 else None
    well = found.serves and layout.gpus <= cards and found.held and not why
    yield Row(f"layout {layout.name}", "ok" if well else "note",
              f"{one.arithmetic}, at a context of {found.load.context:,}; {room}{few}{f'; {why}' if why else ''}",
              "one stage, or vLLM 0.33" if why else "")  # fmt: skip
    return found if well else None


def _host_gib() -> float | None:
    total = host.memory_bytes()
    return None if total is None else total / memory.GIB


def _host(best: Estimate, load: Load, gib: float | None) -> Generator[Row, None, bool]:
    """Whether what is pinned does not fit the host."""
    if gib is None:
        return False
    if load.engram_on_gpu:
        yield Row("host memory", "note",
                  f"{gib:.0f} GiB; Engram's tables, {memory.ENGRAM} GiB, do not fit there: the line puts them on the GPUs")  # fmt: skip
        return False
    needed = best.host.needed(huge_pages=load.huge_pages)
    rounded = best.host.needed(huge_pages=False)
    text = f"{gib:.0f} GiB; Engram's tables take {memory.ENGRAM} GiB of it, pinned"
    if gib < needed:
        yield Row(
            "host memory", "problem", text, f"{needed:.0f} GiB and room for the rest, or Engram on the GPUs"
        )
        return True
    if gib < rounded + reasons.HOST_ROOM:
        text += f"; {rounded:.0f} GiB as PyTorch rounds them up, unless --engram-config has use_thp"
    yield Row("host memory", "note" if gib < needed + reasons.HOST_ROOM else "ok", text)
    return False


def usable(gpus: GpuReport) -> list[Gpu]:
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
        "load": advice.load.data(),
        "layout": best
        and {
            "name": best.layout.name,
            "tensor_parallel": best.layout.tp,
            "partition": list(best.layout.partition),
            "expert_parallel": best.layout.expert_parallel,
            "tokens": best.tokens,
            "cuda_gib": round(best.memory, 2),
            "usable_gib": round(best.usable, 2),
            "stages": [
                {name: round(value, 2) for name, value in stage.parts.items()} for stage in best.stages
            ],
        },
    }
