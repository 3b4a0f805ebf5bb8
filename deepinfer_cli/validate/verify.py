"""Runs the levels that this machine allows, and says which it could not."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator

from deepinfer_cli.errors import UsageError
from deepinfer_cli.overlay import payload
from deepinfer_cli.validate import liverun, runner
from deepinfer_cli.validate.levels import LEVELS, MOST_AT_ONCE
from deepinfer_cli.validate.model import CaseResult, Level, NotRun, VerifyReport
from deepinfer_cli.validate.ops import bindings_only, check_known, ops_of
from deepinfer_cli.validate.request import Request, Run

OnEvent = Callable[[CaseResult | NotRun], None]

# a workload runs on both; every other case belongs to one level
_SHARE_CASES = {Level.INTERPRETER, Level.NUMERICS}


def verify(request: Request, on_event: OnEvent | None = None) -> VerifyReport:
    """Runs what was asked for.

    Args:
        request: what to verify.
        on_event: called with every result, and with every level that cannot run, as it comes.

    Raises:
        UsageError: an op or a case that the payload does not have.
        FailedError: the payload changed meanwhile.
    """
    digest, ops = payload.load(request.payload_root).digest, _chosen_ops(request)
    # ops share kernels
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as folder:
        run = Run(request, digest, ops, runner.shared_caches(folder))
        if not (request.ops or request.case) and (bare := bindings_only(request.payload_root)):
            run.notes.append(f"no kernel of its own, checked by level live: {', '.join(bare)}")
        return _verify(run, on_event)


def _verify(run: Run, on_event: OnEvent | None) -> VerifyReport:
    began, request = time.perf_counter(), run.request
    levels = request.levels or tuple(Level)
    if any(level is not Level.STATIC for level in levels):
        run.found = runner.probe(request.python)
    results: list[CaseResult] = []
    not_run: list[NotRun] = []
    for outcome in _outcomes(run, [level for level in Level if level in levels]):
        if isinstance(outcome, NotRun):
            not_run.append(outcome)
        elif request.case in (None, outcome.case) or outcome.case == f"{outcome.op}[start]":
            results.append(outcome)
        else:
            continue
        if on_event is not None:
            on_event(outcome)
    if request.case is not None and not results and not not_run:
        raise _no_case(request)
    if request.case is not None and results:
        levels_of_case = {result.level for result in results} | set(request.levels)
        if levels_of_case & _SHARE_CASES:
            levels_of_case |= _SHARE_CASES
        not_run = [item for item in not_run if item.level in levels_of_case]
    return VerifyReport(
        tuple(results), tuple(not_run), {"root": str(request.payload_root), "digest": run.digest},
        tuple(run.notes), time.perf_counter() - began, seconds_of(run.took),
    )  # fmt: skip


def _outcomes(run: Run, levels: list[Level]) -> Iterator[CaseResult | NotRun]:
    """Those of all levels, in order; what works on the processor and what works on the GPU run side by side."""

    def outcomes(level: Level, crew: runner.Crew) -> Iterator[CaseResult | NotRun]:
        run.crew = crew  # the same for all that run side by side
        began = time.perf_counter()
        yield from LEVELS[level](run)
        run.took.append((level, "", time.perf_counter() - began))

    workers = [level for level in levels if level not in (Level.STATIC, Level.LIVE)]
    roomy = (os.cpu_count() or 1) > MOST_AT_ONCE
    for group in ([Level.STATIC], workers, [Level.LIVE]):
        asked = [level for level in group if level in levels]
        yield from runner.side_by_side(asked, outcomes, len(asked) if roomy else 1)


def seconds_of(took: Iterable[tuple[Level, str, float]]) -> tuple[tuple[Level, str, float], ...]:
    """Level, op and seconds; of an op with several workers from the start of each to its end, added up.

    The op of a level's own time is empty.
    """
    found: dict[tuple[Level, str], float] = {}
    for level, op, seconds in took:
        found[level, op] = found.get((level, op), 0.0) + seconds
    order = list(Level)
    pairs = sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    return tuple((level, op, seconds) for (level, op), seconds in pairs)


def _chosen_ops(request: Request) -> tuple[str, ...]:
    known = ops_of(request.payload_root)
    wanted = request.ops or ((request.case.partition("[")[0],) if request.case else ())
    unknown = sorted(set(wanted) - set(known) - ({liverun.OP} if request.case else set()))
    if unknown and not request.ops and not set(unknown) & set(bindings_only(request.payload_root)):
        raise _no_case(request)
    if unknown:
        check_known(unknown, request.payload_root, f"level {Level.LIVE.value} checks that it is bound")
    return tuple(op for op in known if not wanted or op in wanted)


def _no_case(request: Request) -> UsageError:
    return UsageError(
        f"there is no case {request.case}", code="case-unknown", hint="`deepinfer verify --json` lists them"
    )
