"""`deepinfer plan`: which layouts some GPUs can serve, what each part takes, how many tokens the KV cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepinfer_cli import outfile
from deepinfer_cli.commands import plan_table
from deepinfer_cli.commands.plan_request import RELEASES, Machine, PlanOptions, load_of, machine_of, target_of
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import ExitCode, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.planner import chart, vllm_check
from deepinfer_cli.result import ErrorItem, Result
from deepinfer_cli.serve import layout, memory, partition, reasons, recommend, settings
from deepinfer_cli.serve.advice import what_would, without_layout
from deepinfer_cli.serve.command import serve_line
from deepinfer_cli.serve.memory import Layout, Load
from deepinfer_cli.serve.recommend import Option


def run(opts: PlanOptions, out: Output) -> Result:
    """Plans, shows, draws.

    Raises:
        UsageError: what is asked for is impossible on any machine, and the nearest that is not.
        UnsupportedError: there is no GPU to plan for, or no matplotlib.
    """
    if opts.chart is not None:
        chart.check(opts.chart)
        outfile.check(opts.chart)
    target = target_of(opts)
    load = load_of(opts, target)
    tps = layout.parse(opts.layout) if opts.layout is not None else None
    if opts.partition is not None and tps is None:
        raise UsageError(
            "--partition needs --layout", code="usage", hint="such as --layout tp4pp2 --partition 20,20"
        )
    sizes = layout.sizes(opts.partition, len(tps)) if tps else None
    machine = machine_of(opts, sum(tps) if tps else None)
    contexts = recommend.lengths(opts.context)
    if tps is not None:
        chosen = layout.choose(tps, sizes, machine.gib, load, contexts, opts.expert_parallel, machine.host)
        one = chosen.found[0]
        refused = _why_refused(one.estimate.layout, machine, chosen.load, contexts)
    else:
        chosen = recommend.choose(
            machine.gpus, machine.gib, load, contexts, opts.expert_parallel, machine.host
        )
        one = chosen.best or recommend.closest(chosen.found)
        refused = _refused(machine, load, contexts)
    found, best = chosen.found, chosen.best
    found.sort(key=lambda option: (not option.serves, recommend.rank(option)))
    checked = _check(opts, target, one, out)
    data = _data(machine, load, found, one, best, refused, checked) | {"explained": tps is not None}
    data["asked"] = load.data() | {"context": opts.context}
    plan_table.show(out, data)
    if opts.chart is not None:
        outfile.write(opts.chart, chart.draw(data, opts.chart.suffix))
        out.note(f"drawn to {opts.chart}")
    unchanged = _unchanged(opts, machine, load, contexts) if best is None and tps else None
    return _result(data, machine, load, contexts, one, best, unchanged, opts.expert_parallel)


def _why_refused(
    refused: Layout, machine: Machine, load: Load, contexts: Sequence[int]
) -> list[tuple[str, str]]:
    """Why nobody gets a layout, with the partition that is nearest where another one would start."""
    found = list(reasons.refused(refused, load.release))
    if not refused.stock and not refused.uneven and not partition.no_stages(load.release):
        found[-1] += f"; {layout.instead(refused, machine.gib, load, contexts)}"
    return [(refused.name, why) for why in found]


def _refused(machine: Machine, load: Load, contexts: Sequence[int]) -> list[tuple[str, str]]:
    """Layouts of so many GPUs that nobody gets, and why."""
    gpus = machine.gpus
    found: list[tuple[str, str]] = []
    odd = [tp for tp in range(3, min(gpus, 8) + 1) if tp not in memory.TENSOR_PARALLEL]
    if odd:
        name = ", ".join(f"TP{tp}" for tp in odd)
        found += [(name, next(reasons.refused(Layout(odd[0]), load.release)).partition(": ")[2])]
    found += _refused_stages(gpus, load.release)
    for known in (Layout(2, (14, 14, 12)), Layout(2, (14, 26), uneven=(2, 4))):
        if known.gpus == gpus:
            why = "; ".join(why for _, why in _why_refused(known, machine, load, contexts))
            found.append((known.name, why))
    if gpus > 1 and load.speculative and not partition.no_stages(load.release):
        found.append(
            ("DSpark with PP", "vLLM 0.30 to 0.33 raises: the model does not hand the drafter's inputs on")
        )
    return found


def _refused_stages(gpus: int, release: str) -> list[tuple[str, str]]:
    """Numbers of stages that `release` refuses, and why."""
    if gpus > 1 and (why := partition.no_stages(release)):
        return [("PP2 and more", why)]
    found = []
    equal = [
        n
        for n in range(2, min(gpus, partition.MAX_STAGES) + 1)
        if not partition.check(partition.even(n)).legal
    ]
    if equal:
        name = f"PP{equal[0]}" + (f" to PP{equal[-1]}" if len(equal) > 1 else "")
        found.append((f"{name} in vLLM's own equal stages",
                      f"stages can begin at layers {partition.BEGINNINGS} only: elsewhere their layers share a KV cache with those before, "
                      f"and vLLM 0.30 to 0.33 raises NotImplementedError; {partition.VARIABLE} names better ones"))  # fmt: skip
    return found


def _unchanged(opts: PlanOptions, machine: Machine, load: Load, contexts: Sequence[int]) -> str | None:
    """What these GPUs serve where no layout is asked for."""
    found = without_layout(machine.gpus, machine.gib, load, contexts, opts.expert_parallel, machine.host)
    words = "--layout and --partition" if opts.partition else "--layout"
    return f"{found} (leave {words} out)" if found else None


def _check(opts: PlanOptions, target: Target | None, one: Option, out: Output) -> dict[str, Any] | None:
    """What the target's own planner says; None where it is not asked."""
    if not opts.check or target is None or not one.estimate.layout.stock or not one.estimate.fits:
        return None
    if opts.release is not None and opts.release != target.version:
        return None
    with out.progress(None, "asking vLLM's own planner") as progress:
        progress.say(f"asking the planner of vLLM {target.version}")
        return vllm_check.ask(target, one.estimate, one.load)


def _data(
    machine: Machine,
    load: Load,
    found: Sequence[Option],
    one: Option,
    best: Option | None,
    refused: Sequence[tuple[str, str]],
    checked: dict[str, Any] | None,
) -> dict[str, Any]:
    starts = reasons.starts_on(one.estimate.layout, one.load)
    line = None
    if best is not None and best.held and starts and load.block_size == memory.BLOCK_SIZE:
        pages = reasons.huge_pages(best.estimate, best.load, machine.host)
        line = serve_line(best.estimate.layout, best.load, huge_pages=pages)
    return {
        "gpus": machine.gpus,
        "gpu_memory_gib": round(machine.gib, 2),
        "host_memory_gib": machine.host and round(machine.host, 1),
        "load": one.load.data(),
        "layouts": [plan_table.option_data(option) for option in found],
        "layout": plan_table.option_data(one),
        "starts_on": list(starts),
        "stock": "stock" in starts,
        "reasons": list(reasons.why(one.estimate, one.load, machine.gpus)),
        "refused": [{"layout": name, "reason": why} for name, why in refused],
        "host": plan_table.host_data(one, machine.host),
        "notes": _notes(load, one, machine),
        "longer": _longer(found, best),
        "line": line,
        "check": checked,
    }


def _longer(found: Sequence[Option], best: Option | None) -> dict[str, Any] | None:
    """The layout for a longer context than the best one's, where there is one."""
    other = recommend.longer(found, best) if best is not None and best.held else None
    if other is None:
        return None
    return {"context": other.load.context, "layout": other.estimate.layout.name}


def _notes(load: Load, one: Option, machine: Machine) -> list[str]:
    found = []
    if one.load.speculative < load.speculative:
        found.append(
            f"the {load.speculative} tokens of DSpark are left out: vLLM 0.30 to 0.33 refuses it with pipeline stages for this model"
        )
    if load.block_size != memory.BLOCK_SIZE:
        found.append(
            f"blocks of {load.block_size}: the indexer's cache on SM8x has blocks of {memory.BLOCK_SIZE} and no other, so there "
            "is no line (v1/attention/backends/mla/indexer.py)"
        )
    if load.release not in RELEASES:
        found.append(f"vLLM {load.release} is not one of {', '.join(RELEASES)}: planned as the nearest")
    if one.load.sequences < load.sequences:
        found.append(
            f"{load.sequences} sequences at once are lowered to {one.load.sequences}: the decode logits of more are not counted"
        )
    if one.load.engram_on_gpu and not load.engram_on_gpu:
        found.append(
            f"the host has {machine.host:.0f} GiB, too few for Engram's tables ({memory.ENGRAM} GiB, pinned): planned with them on "
            "the GPUs, as with --engram gpu"
        )
    if one.serves:
        found += reasons.uncertain(one.estimate, one.load)
    shares = settings.share_findings(load.utilization)
    return found + [f"{it.name}: {it.text}; {it.hint}" for it in shares]


def _result(
    data: dict[str, Any],
    machine: Machine,
    load: Load,
    contexts: Sequence[int],
    one: Option,
    best: Option | None,
    unchanged: str | None,
    experts: bool | None,
) -> Result:
    if best is not None and best.held:
        return Result("plan", data)
    if best is not None:
        return _no_room(data, machine, load, contexts, best, experts)
    would = what_would(machine.gpus, machine.gib, load, contexts, experts)
    nearest = (unchanged,) if unchanged else tuple(would)
    data["nearest"] = list(nearest)
    hint = "the nearest: " + "; or ".join(nearest) if nearest else "more GPUs, or larger ones"
    said = f"{_does_not(data, one)}: {_lacking(one, load)}"
    item = ErrorItem("model-does-not-fit", said, unchanged or hint)
    return Result("plan", data, ExitCode.UNSUPPORTED, (item,))


def _does_not(data: dict[str, Any], one: Option) -> str:
    """What does not serve: the layout that is asked for, or the GPUs."""
    what = f"{data['gpus']} x {data['gpu_memory_gib']:g} GiB"
    if not data["explained"]:
        return f"{what} cannot serve it"
    name = replace(one.estimate.layout, expert_parallel=False).name
    return f"{name} does not {'serve it on' if one.estimate.fits else 'fit'} {what}"


def _lacking(one: Option, load: Load) -> str:
    """What there is too little of."""
    short = one.estimate.pool
    if one.few and short.concurrency >= load.concurrency:
        return f"{one.estimate.layout.name} has the logits of {one.load.sequences} sequences; {load.concurrency:g} are asked for"
    return (
        f"{one.estimate.layout.name} leaves {short.tokens:,} tokens, {short.concurrency:.2f} requests of "
        f"{one.load.context:,}; {one.load.concurrency:g} are asked for"
        if one.estimate.fits
        else f"{one.estimate.arithmetic} at a context of {one.load.context:,}"
    )


def _no_room(
    data: dict[str, Any],
    machine: Machine,
    load: Load,
    contexts: Sequence[int],
    best: Option,
    experts: bool | None,
) -> Result:
    """The GPUs would do, and the host's memory does not."""
    needed = best.estimate.host.needed(huge_pages=load.huge_pages)
    tables = not load.engram_on_gpu
    moved = replace(load, engram_on_gpu=True)
    there = tuple(what_would(machine.gpus, machine.gib, moved, contexts, experts)) if tables else ()
    data["nearest"] = list(there)
    said = f"the host has {machine.host:.0f} GiB, and {best.estimate.layout.name} pins {needed:.0f}"
    said += " with Engram's tables; on the GPUs they do not fit either" if tables else " for token ids"
    hint = f"a host of {needed + reasons.HOST_ROOM:.0f} GiB"
    hint += "".join(f"; or with --engram gpu {one}" for one in there)
    return Result("plan", data, ExitCode.UNSUPPORTED, (ErrorItem("host-memory-too-small", said, hint),))
