"""The rows of `deepinfer doctor` on serving: switches, kernels, settings, and the line to serve with."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_cli.commands.doctor_row import Row, Status
from deepinfer_cli.detect import host
from deepinfer_cli.detect.gpu import Gpu, GpuReport
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import UsageError
from deepinfer_cli.render import joined
from deepinfer_cli.serve import kernels, memory, partition, recommend, settings
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


def switch_rows() -> Iterator[Row]:
    """The `DEEPINFER_*` variables of this shell."""
    from deepinfer_sm80 import gate

    from deepinfer_cli.overlay import payload
    from deepinfer_cli.validate import switches

    try:
        found = switches.read(payload.bundled().root)
    except UsageError as error:
        yield Row("switches", "problem", str(error), error.hint or "")
        return
    said = [f"{gate.DISABLE} is on"] if found.disabled else []
    said += [f"{gate.DISABLE_OPS} leaves {joined(found.ops)} to stock"] if found.ops else []
    said += [f"{gate.FORCE_ARCH} takes {found.forced}'s kernels on any card"] if found.forced else []
    yield Row("switches", "note" if said else "ok", "; ".join(said) or "none set")


def kernel_rows(target: Target, gpus: GpuReport) -> Iterator[Row]:
    """The attention class and the kernels on each kind of card, and why."""
    from deepinfer_sm80 import gate

    from deepinfer_cli.overlay import manifest
    from deepinfer_cli.overlay.inspect import inspect

    known = manifest.load()
    found = inspect(target)
    installed: tuple[str, ...] = ()
    if found.state in ("installed", "unrecorded"):
        ops = found.record.ops if found.record else tuple(op.name for op in known.ops if op.replaces)
        installed = tuple(name for name in ops if name not in found.skip)
    try:
        off = gate.disabled()
        disabled = () if off else gate.disabled_ops(op.name for op in known.ops if op.replaces)
    except gate.SwitchError:
        return
    for arch, served in dict.fromkeys((gpu.arch or "unknown", gpu.served) for gpu in gpus.gpus):
        choice = kernels.choose(known, served, installed=installed, disabled=disabled, off=off)
        yield Row(f"attention {arch}", choice.status, choice.attention, choice.hint)
        if served and installed:
            rest = f"; left to stock: {joined(choice.stock)}" if choice.stock else ""
            yield Row(f"kernels {arch}", "ok", f"the overlay's: {joined(choice.ours) or 'none'}{rest}",
                      "experts and linears: stock's Marlin MXFP4 and MXFP8, by vLLM's own choice")  # fmt: skip


def setting_rows(target: Target | None, asked: Asked) -> Iterator[Row]:
    """Settings that go wrong: of this shell, of the line that is asked about, and of running servers."""
    release = _release(target)
    words = shlex.split(asked.serve) if asked.serve else []
    options = settings.parse_options(words)
    environ = dict(os.environ) | dict(_assignments(words))
    if asked.tp is not None:
        options["tensor-parallel-size"] = str(asked.tp)
    if asked.pp is not None:
        options["pipeline-parallel-size"] = str(asked.pp)
    if asked.partition is not None:
        environ[partition.VARIABLE] = asked.partition
        if asked.pp is None and "pipeline-parallel-size" not in options:
            options["pipeline-parallel-size"] = str(asked.partition.count(",") + 1)
    found = settings.check(settings.Settings(environ, options, release))
    if partition.VARIABLE in environ and "pipeline-parallel-size" not in options:
        found += settings.partition_findings(environ[partition.VARIABLE], None, release)
    yield from _findings(found, "settings")
    yield from _partition(environ.get(partition.VARIABLE), found)
    yield from _running(target, release)


def _findings(found: list[settings.Finding], name: str) -> Iterator[Row]:
    for one in found:
        yield Row(f"{name}: {one.name}", one.severity, f"{one.text} ({one.source})", one.hint)
    if not found:
        yield Row(name, "ok", "none that is known to go wrong")


def _partition(given: str | None, found: list[settings.Finding]) -> Iterator[Row]:
    if given is not None and not any(partition.VARIABLE in one.name for one in found):
        yield Row("partition", "ok", partition.check(partition.parse(given)).reason)


def _running(target: Target | None, release: str) -> Iterator[Row]:
    from deepinfer_cli.detect.process import running

    for process in running(target.root) if target else ():
        words = process.command.split()
        if "serve" in words:
            options = settings.parse_options(words[words.index("serve") :])
            found = settings.check(settings.Settings({}, options, release))
            yield from _findings(found, f"process {process.pid}")


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
    load = Load(release=_release(target))
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


def _assignments(words: list[str]) -> Iterator[tuple[str, str]]:
    """`NAME=value` in front of a command."""
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            return
        yield name, value


def _release(target: Target | None) -> str:
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
