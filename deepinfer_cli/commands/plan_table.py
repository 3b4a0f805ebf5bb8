"""What `deepinfer plan` shows: layouts, memory by part of each stage, the pool, the host, what is refused; and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deepinfer_cli.output import Output
from deepinfer_cli.render import Justify, Table, plural, table
from deepinfer_cli.serve import reasons
from deepinfer_cli.serve.recommend import Option

RIGHT: Justify = "right"
SERVES, UNCERTAIN, REFUSED, SMALL, NO_FIT, NO_HOST, FEW = (
    "serves",
    "serves, within what is uncertain of this estimate",
    "refused",
    "pool too small",
    "does not fit",
    "host memory too small",
    "too few sequences",
)


def option_data(option: Option) -> dict[str, Any]:
    """A layout with everything that is known about it."""
    found, load = option.estimate, option.load
    layout, pool = found.layout, found.pool
    return {
        "name": layout.name,
        "tensor_parallel": list(layout.tps),
        "partition": list(layout.partition),
        "expert_parallel": layout.expert_parallel,
        "gpus": layout.gpus,
        "starts_on": list(starts := reasons.starts_on(layout, load)),
        "stock": "stock" in starts,
        "status": status(option),
        "refused": list(reasons.refused_short(layout, load.release)),
        "note": reasons.short(layout, load),
        "context": load.context,
        "sequences": load.sequences,
        "speculative_tokens": load.speculative,
        "cuda_gib": round(found.memory, 3),
        "usable_gib": round(found.usable, 3),
        "stages": [
            {
                "layers": [stage.layers.start, stage.layers.stop - 1],
                "tensor_parallel": stage.tp,
                "parts_gib": {name: round(size, 3) for name, size in stage.parts.items()},
                "sum_gib": round(stage.total, 3),
                "kv_gib": round(max(found.usable - stage.total, 0.0), 3),
                "block_bytes": stage.block_bytes,
            }
            for stage in found.stages
        ],
        "pool": {
            "tokens": found.tokens,
            "contexts": round(pool.concurrency, 4) if found.fits else 0.0,
            "blocks": pool.blocks if found.fits else 0,
            "request_blocks": pool.request_blocks,
            "limiting_stage": (pool.limiting if found.fits else found.tightest) + 1,
            "groups": [[group.kind, len(group.pages)] for group in pool.groups],
        },
    }


def status(option: Option) -> str:
    """`REFUSED`; `SERVES`, `UNCERTAIN`; `NO_HOST`; `FEW`; `SMALL`; `NO_FIT`."""
    if any(reasons.refused_short(option.estimate.layout, option.load.release)):
        return REFUSED
    if option.serves and not option.held:
        return NO_HOST
    if option.serves:
        return UNCERTAIN if option.uncertain else SERVES
    if option.few and option.estimate.serves(option.load.concurrency):
        return FEW
    return SMALL if option.estimate.fits else NO_FIT


def host_data(option: Option, total: float | None) -> dict[str, Any]:
    """The host's memory in GiB."""
    host = option.estimate.host
    return {
        "total_gib": total and round(total, 1),
        "engram_gib": round(host.tables, 2),
        "engram_rounded_gib": round(host.rounded, 2),
        "token_ids_gib": round(host.tokens, 2),
        "needed_gib": round(host.needed(huge_pages=option.load.huge_pages), 2),
        "needed_rounded_gib": round(host.needed(huge_pages=False), 2),
    }


def refused_line(data: dict[str, Any]) -> str | None:
    """That vLLM refuses the layout that is explained, and why in short; None where it does not."""
    why = "; ".join(data["layout"]["refused"])
    return f"refused by vLLM {data['load']['release']}: {why}" if why else None


def show(out: Output, data: dict[str, Any]) -> None:
    """Prints the plan."""
    if refused := refused_line(data):
        out.line(refused)
    if not data["explained"]:
        everything = out.verbose > 0
        fitting = [one for one in data["layouts"] if one["status"] != NO_FIT] or [data["layout"]]
        rest = len(data["layouts"]) - len(fitting)
        out.table(_layouts(data, data["layouts"] if everything else fitting, notes=everything))
        if rest and not everything:
            out.line(
                f"{plural(rest, 'other layout')} of these GPUs {'does' if rest == 1 else 'do'} not fit: -v shows them, with notes"
            )
    if longer := data["longer"]:
        out.line(f"note: with --context {longer['context']}: {longer['layout']}")
    out.table(_stages(data["layout"], data["gpu_memory_gib"]))
    for line in _lines(data):
        out.line(line)
    if data["refused"]:
        rows = ((row["layout"], row["reason"]) for row in data["refused"])
        out.table(table(("Refused", "Why"), rows, "Refused"))
    # beside the line, where they are read
    for note in data["notes"]:
        out.line(f"note: {note}")
    if data["line"]:
        out.line(data["line"])


def _layouts(data: dict[str, Any], shown: Sequence[dict[str, Any]], *, notes: bool) -> Table:
    # without notes six columns: they fit a terminal of 80 characters
    headers: list[str | tuple[str, Justify]] = ["Layout", "Status", ("GPUs", RIGHT), ("Without KV (GiB)", RIGHT),
                                                ("Pool (tokens)", RIGHT), ("Contexts", RIGHT)]  # fmt: skip
    headers += ["Note"] if notes else []
    rows = []
    for one in shown:
        tight = max(stage["sum_gib"] for stage in one["stages"])
        pool, fits = one["pool"], one["status"] != NO_FIT
        row = [
            one["name"], one["status"], one["gpus"], f"{tight:.1f} of {one['usable_gib']:.1f}",
            f"{pool['tokens']:,}" if fits else None, f"{pool['contexts']:.2f} x {one['context']:,}" if fits else None,
        ]  # fmt: skip
        rows.append([*row, one["note"]] if notes else row)
    title = f"{data['gpus']} x {data['gpu_memory_gib']:g} GiB, vLLM {data['load']['release']}: layouts, the best first"
    return table(headers, rows, title)


def _stages(one: dict[str, Any], card: float) -> Table:
    stages = one["stages"]
    several = len(stages) > 1
    headers = [
        f"Stage {index}: layers {stage['layers'][0]}-{stage['layers'][1]}, TP{stage['tensor_parallel']} (GiB)"
        if several
        else f"Each of {one['gpus']} GPU{'s' if one['gpus'] > 1 else ''} (GiB)"
        for index, stage in enumerate(stages, 1)
    ]
    parts = [name for name in stages[0]["parts_gib"] if any(stage["parts_gib"][name] for stage in stages)]
    rows = [(name, *(f"{stage['parts_gib'][name]:.2f}" for stage in stages)) for name in parts]
    rows.append(("without KV cache", *(f"{stage['sum_gib']:.2f}" for stage in stages)))
    rows.append(
        ("left for the KV cache", *(f"{one['usable_gib'] - stage['sum_gib']:.2f}" for stage in stages))
    )
    seen = f"CUDA sees about {one['cuda_gib']:.2f} of {card:g} GiB"
    rows.append((f"vLLM's share of the card ({seen})", *(f"{one['usable_gib']:.2f}" for _ in stages)))
    right: list[tuple[str, Justify]] = [(header, RIGHT) for header in headers]
    return table(("Part", *right), rows, f"{one['name']}: memory of each GPU")


def _lines(data: dict[str, Any]) -> Iterator[str]:
    one, pool, host = data["layout"], data["layout"]["pool"], data["host"]
    limits = f"; stage {pool['limiting_stage']} decides" if len(one["stages"]) > 1 else ""
    yield (
        f"KV pool: {pool['tokens']:,} tokens, {pool['contexts']:.2f} requests of {one['context']:,}: {pool['blocks']:,} blocks, "
        f"of which one request may hold {pool['request_blocks']:,}{limits}"
    )
    if host["engram_gib"]:
        less = host["needed_gib"] < host["needed_rounded_gib"]
        pages = f"; {host['needed_gib']:.0f} with huge pages" if less else ""
        total = f" The host has {host['total_gib']:.0f}." if host["total_gib"] else ""
        yield (
            f"Host memory: {host['needed_rounded_gib']:.0f} GiB pinned: Engram {host['engram_rounded_gib']:.0f} as PyTorch rounds "
            f"{host['engram_gib']:.1f} up, token ids {host['token_ids_gib']:.1f}{pages}.{total}"
        )
    yield from (f"- {reason}" for reason in data["reasons"][1:])
    if data["check"]:
        yield _checked(data["check"], data["load"]["release"])
    yield "Weights, tables, workspace and pool follow the model's shapes and vLLM's code; activations, graphs and libraries are estimates."


def _checked(check: dict[str, Any], release: str) -> str:
    if "error" in check:
        return f"vLLM's own planner was not asked: {check['error']}"
    verdict = "agrees" if check["agrees"] else "DIFFERS"
    return (
        f"The planner of vLLM {release} {verdict}: {check['tokens']:,} tokens, {check['concurrency']:.2f} requests, "
        f"{check['blocks']:,} blocks from the same bytes"
    )
