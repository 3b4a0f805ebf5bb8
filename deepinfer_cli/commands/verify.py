"""`deepinfer verify`: proves the installed overlay, from what is on disk to what a GPU computes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer_cli import outfile
from deepinfer_cli.commands import common, pairs, verify_table
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.arch import arch_name
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import ExitCode, UnsupportedError, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay import payload
from deepinfer_cli.render import Justify, plural, table
from deepinfer_cli.result import ErrorItem, Result
from deepinfer_cli.validate import runner, switches, verify
from deepinfer_cli.validate.model import CaseResult, Level, NotRun, Status, VerifyReport
from deepinfer_cli.validate.request import Request

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
    request = Request(
        target, root, interpreter(opts.where, target, out if runs else None), levels, opts.suite or SUITES[0],
        opts.ops, opts.case, opts.arch, opts.max_smem, opts.timeout_s or runner.DEFAULT_TIMEOUT_S,
    )  # fmt: skip
    with out.progress(None, "verify") as progress:
        group: list[CaseResult] = []

        def end_group() -> None:
            for row in verify_table.summary_rows(group):
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


def _finish(opts: VerifyOptions, out: Output, request: Request, report: VerifyReport) -> Result:
    headers = ("Level", "Op", ("Passed", RIGHT), ("Failed", RIGHT), ("Skipped", RIGHT))
    out.table(table(headers, verify_table.summary_rows(report.results)))
    for content in verify_table.tables(report):
        out.table(content)
    for item in report.not_run:
        out.line(f"not run: {item.level.value}: {item.reason}. To run it: {item.how}")
    for failed in report.failed:
        for line in verify_table.detail(failed, verify_table.rerun(opts, failed)):
            out.line(line)
    out.line(verify_table.sentence(report))
    return Result("verify", verify_table.data(request, report), *_verdict(opts, report))


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
