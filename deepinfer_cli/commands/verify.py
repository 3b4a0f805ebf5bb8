"""`deepinfer verify`: proves the installed overlay, from what is on disk to what a GPU computes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepinfer_cli import outfile
from deepinfer_cli.commands import common, pairs
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.arch import arch_name
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import ExitCode, UnsupportedError, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay import payload
from deepinfer_cli.render import Justify, Table, plural, table
from deepinfer_cli.result import ErrorItem, Result
from deepinfer_cli.validate import runner, switches, verify
from deepinfer_cli.validate.model import CaseResult, Level, NotRun, Status, VerifyReport

SUITES = ("smoke", "full")
# the levels that run, or build, the kernels of an overlay
_KERNELS = {Level.COMPILE, Level.INTERPRETER, Level.NUMERICS}
RIGHT: Justify = "right"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What `verify` was asked to do.

    Attributes:
        where: which vLLM; `python` also names the interpreter the kernels run in.
        ops: positional OPS and `--ops a,b`; empty means all.
        levels: `--level`, repeatable: static, compile, interpreter, numerics, live; empty means all that can run.
        suite: `--suite` smoke or full; None means smoke.
        case: `--case ID`, one case alone.
        arch: `--arch` sm80, sm86 or sm89: builds for it alone, and runs its code on a newer card.
        max_smem: `--max-smem BYTES`, only kernel variants that take no more shared memory.
        timeout_s: `--timeout SECONDS` for one case, or for one engine of `--e2e`.
        output: `--output FILE`, also writes the JSON document there.
        e2e: `--e2e`, the small model through vLLM's engine instead of the levels; `full` (`--full`) all of it.
    """

    where: TargetOptions = field(default_factory=TargetOptions)
    ops: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    suite: str | None = None
    case: str | None = None
    arch: str | None = None
    max_smem: int | None = None
    timeout_s: float | None = None
    output: Path | None = None
    e2e: bool = False
    full: bool = False


def run(opts: VerifyOptions, out: Output) -> Result:
    """Runs the levels that can run, shows them, and says which could not.

    Raises:
        UsageError: an unknown level, suite, architecture, op or case, or a `DEEPINFER_*` variable that means nothing.
        FailedError: a transaction is unfinished, or the overlay changed during the check.
    """
    return outfile.document(opts.output, "verify", lambda: _run(opts, out), out)


def _run(opts: VerifyOptions, out: Output) -> Result:
    levels = parse_levels(opts.levels)
    check_choice("--suite", opts.suite or SUITES[0], SUITES)
    if opts.arch is not None:
        opts = replace(opts, arch=arch_name(opts.arch))
    pairs.check_verify(opts)
    target = find_target(opts.where, out)
    if opts.e2e:
        return _end_to_end(opts, target, out)
    root = payload_root(target, out if not levels or _KERNELS & set(levels) else None)
    switches.read(root)
    runs = not levels or set(levels) != {Level.STATIC}
    request = verify.Request(
        target, root, interpreter(opts.where, target, out if runs else None), levels, opts.suite or SUITES[0],
        opts.ops, opts.case, opts.arch, opts.max_smem, opts.timeout_s or runner.DEFAULT_TIMEOUT_S,
    )  # fmt: skip
    with out.progress(None, "verify") as progress:
        group: list[CaseResult] = []

        def end_group() -> None:
            for row in summary_rows(group):
                progress.line(
                    f"verify: {row[0]} {row[1]}: {row[2]} passed, {row[3]} failed, {row[4]} skipped"
                )
            group.clear()

        def show(event: CaseResult | NotRun) -> None:
            if isinstance(event, NotRun):
                return
            if group and (group[-1].level, group[-1].op) != (event.level, event.op):
                end_group()
            group.append(event)
            progress.advance(f"{event.level.value} {event.case}")
            out.detail(f"{event.status.value} {event.level.value} {event.case}")

        report = verify.verify(request, show)
        end_group()
    return _finish(opts, out, request, report)


def _end_to_end(opts: VerifyOptions, target: Target | None, out: Output) -> Result:
    from deepinfer_cli.commands import e2e

    if target is None or target.layout is None:
        raise UnsupportedError(
            "there is no vLLM with DeepSeek-V4.1 to run",
            code="nothing-runnable",
            hint="name one with --target or --python",
        )
    switches.read(e2e.installed(target))
    python = interpreter(opts.where, target, out)
    options = e2e.E2eOptions(target, python, opts.full, opts.arch, opts.timeout_s or e2e.TIMEOUT_S)
    return e2e.run(options, out)


def parse_levels(names: Iterable[str]) -> tuple[Level, ...]:
    """The levels that `names` mean.

    Raises:
        UsageError: one of them is none.
    """
    known = tuple(level.value for level in Level)
    for name in names:
        check_choice("--level", name, known)
    return tuple(Level(name) for name in names)


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises UsageError unless `value` is one of `choices`."""
    if value not in choices:
        raise UsageError(
            f"{option} {value} is unknown", code="usage", hint=f"choose from {', '.join(choices)}"
        )


def find_target(where: TargetOptions, out: Output) -> Target | None:
    """The target; None (and said so) where none was named and none is installed."""
    try:
        target = common.locate(where, out)
    except UnsupportedError as error:
        # a path that was given and does not hold a vLLM is a mistake, an empty machine is not
        if where.target is not None or error.code != "vllm-not-found" or "rollback" in (error.hint or ""):
            raise
        out.note(f"no vLLM here ({error.message}): the overlay that came with this DeepInfer is checked")
        return None
    common.refuse_pending(target, where)
    return target


def payload_root(target: Target | None, out: Output | None) -> Path:
    """The overlay to test: the installed one, else the bundled one (and says so, if it is to be said)."""
    if target is not None:
        installed = target.root / payload.PACKAGE
        if (installed / "__init__.py").is_file():
            return installed
        if out is not None:
            out.note("the overlay is not installed in this vLLM: kernels are checked from the bundled one")
    return payload.bundled().root


def interpreter(where: TargetOptions, target: Target | None, out: Output | None) -> Path:
    """The interpreter that runs the kernels: `--python`, the target's own, else this one (and says which, likewise)."""
    if where.python is not None:
        python = where.python.absolute()
    elif target is not None and target.python is not None:
        python = target.python
    else:
        python = Path(sys.executable)
    if out is not None:
        out.note(f"kernels run in {python}")
    return python


def _finish(opts: VerifyOptions, out: Output, request: verify.Request, report: VerifyReport) -> Result:
    headers = ("Level", "Op", ("Passed", RIGHT), ("Failed", RIGHT), ("Skipped", RIGHT))
    out.table(table(headers, summary_rows(report.results)))
    for content in _tables(report):
        out.table(content)
    for item in report.not_run:
        out.line(f"not run: {item.level.value}: {item.reason}. To run it: {item.how}")
    for failed in report.failed:
        for line in detail(failed, rerun(opts, failed)):
            out.line(line)
    out.line(_sentence(report))
    return Result("verify", _data(request, report), *_verdict(opts, report))


def _verdict(opts: VerifyOptions, report: VerifyReport) -> tuple[ExitCode, tuple[ErrorItem, ...]]:
    if report.failed:
        names = [f"{item.level.value} {item.case}" for item in report.failed]
        return ExitCode.FAILED, (
            ErrorItem(
                "verify-failed",
                f"{plural(len(names), 'check')} failed",
                "the commands above run one alone",
                tuple(names),
            ),
        )
    asked = [item for item in report.not_run if item.level.value in opts.levels]
    ran = {result.level.value for result in report.results if result.status is not Status.SKIPPED}
    silent = [name for name in opts.levels if name not in ran and opts.case is None]
    if report.ran and silent and not asked:
        what = f"level {silent[0]} proved nothing: no case of it ran"
        return ExitCode.UNSUPPORTED, (ErrorItem("nothing-runnable", what),)
    if asked or not report.ran:
        missing = (asked or list(report.not_run))[:1]
        what = (
            f"level {missing[0].level.value} could not run: {missing[0].reason}"
            if missing
            else "nothing could run"
        )
        return ExitCode.UNSUPPORTED, (
            ErrorItem("nothing-runnable", what, missing[0].how if missing else None),
        )
    return ExitCode.OK, ()


def summary_rows(results: Iterable[CaseResult]) -> list[tuple[str, ...]]:
    """Level, op, and how many passed, failed and were skipped."""
    results = tuple(results)
    keys = dict.fromkeys((result.level, result.op) for result in results)
    rows = []
    for level, op in keys:
        mine = [result.status for result in results if (result.level, result.op) == (level, op)]
        bad = sum(status.bad for status in mine)
        counts = (mine.count(Status.PASSED), bad, mine.count(Status.SKIPPED))
        rows.append((level.value, op, *map(str, counts)))
    return rows


def _tables(report: VerifyReport) -> Iterable[Table]:
    # also the row that says whether a small variant is there: it counts as one check
    builds = [result for result in report.results if "shared_bytes" in result.extra]
    if builds:
        keys = ("registers", "shared_bytes", "spill_bytes", "ctas_per_sm")
        names = ("Registers", "Shared (B)", "Spills (B)", "CTAs/SM")
        yield table(
            ("Build", *[(name, RIGHT) for name in names], "Status"),
            ((r.case, *(r.extra.get(key) for key in keys), r.status.value) for r in builds),
            "Compile gate",
        )
    skipped = [result for result in report.results if result.status is Status.SKIPPED]
    if skipped:
        yield table(("Skipped", "Level", "Why"), ((r.case, r.level.value, r.reason) for r in skipped))


def rerun(opts: VerifyOptions, result: CaseResult) -> str:
    """The command that runs one case alone."""
    words = ["deepinfer", "verify", "--level", result.level.value, "--case", result.case]
    if opts.suite not in (None, SUITES[0]):
        words += ["--suite", str(opts.suite)]
    for name, value in (("--arch", opts.arch), ("--max-smem", opts.max_smem)):
        words += [name, str(value)] if value is not None else []
    return shlex.join(words) + opts.where.arguments


def detail(result: CaseResult, command: str) -> list[str]:
    """A failure in lines: what, where, how far off, and how to run it again."""
    lines = [f"{result.status.value} {result.level.value} {result.case}", f"  {result.reason}"]
    bad = result.first_bad
    if bad is not None:
        where = f"{bad.output}{list(bad.index)}" if bad.index else bad.output
        lines.append(f"  first bad: {where} is {bad.got}, should be {bad.want}")
    if result.max_abs is not None:
        ratio = "-" if result.matched_ratio is None else f"{result.matched_ratio:.6f}"
        lines.append(
            f"  max abs {result.max_abs:.3e}  max rel {result.max_rel or 0.0:.3e}  matched ratio {ratio}"
        )
    lines += [f"  | {line}" for line in str(result.extra.get("stderr", "")).splitlines()[-8:]]
    return [*lines, f"  run it again: {command}"]


def _sentence(report: VerifyReport) -> str:
    passed, skipped = report.count(Status.PASSED), report.count(Status.SKIPPED)
    text = f"{passed} passed, {len(report.failed)} failed, {skipped} skipped in {report.duration_s:.1f} s"
    return text + "".join(f"; {note}" for note in report.notes)


def _data(request: verify.Request, report: VerifyReport) -> dict[str, Any]:
    return {
        "target": common.target_data(request.target) if request.target else None,
        "payload": report.payload,
        "python": str(request.python),
        "suite": request.suite,
        "results": [result.to_json() for result in report.results],
        "not_run": [{"level": item.level, "reason": item.reason, "how": item.how} for item in report.not_run],
        "counts": {
            "passed": report.count(Status.PASSED),
            "failed": len(report.failed),
            "skipped": report.count(Status.SKIPPED),
        },
        "notes": list(report.notes),
        "duration_s": round(report.duration_s, 3),
        "seconds": [
            {"level": level, "op": op or None, "seconds": round(seconds, 3)}
            for level, op, seconds in report.seconds
        ],
    }
