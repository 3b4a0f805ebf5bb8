"""The names of layouts on a command line: `tp2pp3`, `TP4 x PP2`, `pp6`, `tp2+tp4`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepinfer_cli.errors import UsageError
from deepinfer_cli.serve import memory, partition, recommend
from deepinfer_cli.serve.memory import Layout, Load
from deepinfer_cli.serve.recommend import Choice, Option

_UNEVEN = re.compile(r"tp(\d{1,3})((?:\+tp\d{1,3})+)")
_EVEN = re.compile(r"(?:tp(\d{1,3}))?x?(?:pp(\d{1,3}))?")


def parse(text: str) -> tuple[int, ...]:
    """GPUs of each stage.

    Raises:
        UsageError: it is no layout, or one whose TP does not divide the heads (`layout-impossible`).
    """
    words = text.lower().replace(" ", "").replace("(", "").replace(")", "")
    if found := _UNEVEN.fullmatch(words):
        tps = tuple(int(number) for number in re.findall(r"\d+", words))
    elif (found := _EVEN.fullmatch(words)) and words:
        tps = (int(found[1] or 1),) * int(found[2] or 1)
    else:
        raise UsageError(
            f"{text!r} is no layout", code="layout-impossible", hint="such as tp8, tp4pp2, pp6 or tp2+tp4"
        )
    for tp in tps:
        if tp not in memory.TENSOR_PARALLEL:
            least = min(abs(one - tp) for one in memory.TENSOR_PARALLEL)
            near = [one for one in memory.TENSOR_PARALLEL if abs(one - tp) == least]
            raise UsageError(
                f"TP{tp}: the model's 64 heads and 8 output groups must divide evenly, by 1, 2, 4 or 8",
                code="layout-impossible",
                hint="the nearest: "
                + " or ".join(f"--layout {words.replace(f'tp{tp}', f'tp{one}')}" for one in near),
            )
    if not tps:
        raise UsageError(f"{text!r} has no stage", code="layout-impossible", hint="at least pp1")
    return tps


def check_context(context: int | None) -> None:
    """Refuses what the model has no positions for.

    Raises:
        UsageError: it is longer (`context-too-long`).
    """
    positions = Load().model.positions
    if context is not None and context > positions:
        raise UsageError(
            f"--context {context}: the model has {positions:,} positions",
            code="context-too-long",
            hint=f"the nearest is --context {positions}",
        )


def sizes(text: str | None, stages: int) -> tuple[int, ...] | None:
    """The partition `text` for `stages`; None where none is given.

    Raises:
        UsageError: it does not have the model's layers, or as many stages (`partition-invalid`).
    """
    if text is None:
        return None
    try:
        given = partition.parse(text)
    except ValueError as error:
        raise UsageError(str(error), code="partition-invalid", hint=_near(None, stages)) from None
    verdict = partition.check(given, stages)
    whole = len(given) == stages and min(given) >= 1 and sum(given) == partition.LAYERS
    if not whole:
        raise UsageError(
            f"--partition {text}: {verdict.reason}",
            code="partition-invalid",
            hint=_near(verdict.nearest, stages),
        )
    return given


def choose(
    tps: Sequence[int],
    given: tuple[int, ...] | None,
    gib: float,
    load: Load,
    contexts: Sequence[int],
    expert_parallel: bool | None,
    host: float | None,
) -> Choice:
    """The layout that is explained, alone, with Engram where there is room for it (`recommend.with_host`)."""

    def find(tried: Load) -> tuple[list[Option], Option | None]:
        one = explain(tps, given, gib, tried, contexts, expert_parallel)
        return [one], one if one.serves else None

    return recommend.with_host(find, load, host)


def explain(
    tps: Sequence[int],
    given: tuple[int, ...] | None,
    gib: float,
    load: Load,
    contexts: Sequence[int],
    expert_parallel: bool | None,
) -> Option:
    """The layout with the partition that is given; without one, with the partition that serves the most.

    Raises:
        UsageError: it has more stages than layers, or needs a partition (`layout-impossible`).
    """
    uneven = tuple(tps) if len(set(tps)) > 1 else ()
    stages = len(tps)
    # what stock refuses is explained with vLLM's own equal stages
    choices = [given] if given else list(partition.legal(stages)) or [partition.even(stages)]
    if uneven and not given:
        choices = [(first, partition.LAYERS - first) for first in range(1, partition.LAYERS)]
    if stages > partition.LAYERS or (uneven and stages > 2 and not given):
        raise UsageError(
            f"{stages} stages of {partition.LAYERS} layers"
            if stages > partition.LAYERS
            else f"{stages} stages of different TP need --partition",
            code="layout-impossible",
            hint=f"--layout pp{partition.most_stages(load.release)}, or --partition with layers for each stage",
        )
    kinds = (expert_parallel or False,) if expert_parallel is not None or max(tps) == 1 else (False, True)
    best = None
    for whole in kinds:
        found = [
            recommend.longest(Layout(tps[0], sizes, whole, uneven), gib, load, contexts) for sizes in choices
        ]
        best = max([*([best] if best else []), *found], key=recommend.value)
        # slices are vLLM's own way, and what the overlay was tested with
        if best.serves:
            break
    assert best is not None
    return best


def instead(refused: Layout, gib: float, load: Load, contexts: Sequence[int]) -> str:
    """The partition that starts, nearest to the one of `refused`; of those that do, one that these GPUs hold if there is."""
    stages = min(refused.pp, partition.MAX_STAGES)
    choices = partition.by_distance(refused.partition, stages)
    tps = (refused.tp,) * stages
    held = [one for one in choices if explain(tps, one, gib, load, contexts, None).serves]
    near = held[0] if held else choices[0]
    fewer = f", in {stages} stages" if stages < refused.pp else ""
    if not held:
        return f"the nearest is {partition.text(near)}{fewer}, which does not fit {refused.tp * stages} x {round(gib, 2):g} GiB"
    return f"the nearest {'' if near == choices[0] else 'that fits '}is {partition.text(near)}{fewer}"


def _near(near: tuple[int, ...] | None, stages: int) -> str:
    found = near or partition.legal(min(stages, partition.MAX_STAGES))[0]
    fewer = f", in {len(found)} stages" if len(found) < stages else ""
    return f"the nearest legal one is --partition {partition.text(found)}{fewer}"
