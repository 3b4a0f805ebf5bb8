"""What `deepinfer verify` found: in tables, in lines, and for the JSON document."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from deepinfer_cli.commands import common
from deepinfer_cli.render import Justify, Table, table
from deepinfer_cli.validate.model import CaseResult, Status, VerifyReport
from deepinfer_cli.validate.request import Request

if TYPE_CHECKING:
    from deepinfer_cli.commands.verify import VerifyOptions

RIGHT: Justify = "right"


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


def tables(report: VerifyReport) -> Iterable[Table]:
    """The compile gate's builds, and what was skipped and why."""
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
    if opts.suite not in (None, "smoke"):
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


def sentence(report: VerifyReport) -> str:
    """How many passed, failed and were skipped."""
    passed, skipped = report.count(Status.PASSED), report.count(Status.SKIPPED)
    text = f"{passed} passed, {len(report.failed)} failed, {skipped} skipped in {report.duration_s:.1f} s"
    return text + "".join(f"; {note}" for note in report.notes)


def data(request: Request, report: VerifyReport) -> dict[str, Any]:
    """For the JSON document."""
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
