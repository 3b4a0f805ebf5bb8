"""`deepinfer rollback`: take back what an install wrote, by its record alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.commands import common
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import DeepInferError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay.rollback import RollbackPlan, RollbackReport, apply_rollback, plan_rollback
from deepinfer_cli.render import plural
from deepinfer_cli.result import Result

NOTHING = "nothing to roll back"


@dataclass(frozen=True, slots=True)
class RollbackOptions:
    """What `rollback` was asked to do."""

    where: TargetOptions = field(default_factory=TargetOptions)
    dry_run: bool = False
    yes: bool = False
    force: bool = False


def run(opts: RollbackOptions, out: Output) -> Result:
    """Rolls back, or shows what a rollback would do."""
    where = _where(opts, out)
    parent, state_dir = (
        (where.parent, where.state_dir) if isinstance(where, Target) else (where, where / ".deepinfer")
    )
    if opts.dry_run:
        with _own_hint():
            return _dry_run(opts, out, where, state_dir)
    if not state_dir.exists() and plan_rollback(where).nothing:
        # also where nothing may be written, not even a lock
        return _report(out, where, RollbackReport(nothing=True), None)

    with _own_hint(), common.interruptible(where, opts.where):
        return _roll_back(opts, out, where, parent, state_dir)


@contextmanager
def _own_hint() -> Iterator[None]:
    """An export, which the general hint names, does not help who wants the overlay out."""
    try:
        yield
    except DeepInferError as error:
        if error.code == "read-only":
            error.hint = (
                "run as the owner of this vLLM, where it can be written; DEEPINFER_DISABLE=1 in vLLM's environment "
                "rules the overlay out without writing"
            )
        raise


def _roll_back(
    opts: RollbackOptions, out: Output, where: Target | Path, parent: Path, state_dir: Path
) -> Result:
    from deepinfer_cli.overlay.state import lock

    with lock(state_dir):
        recovered = common.recover(parent, state_dir, out)
        plan = plan_rollback(where)
        if not plan.nothing:
            _show(plan, out, silent=out.quiet and opts.yes)
            plan.check(force=opts.force)
            out.require_yes(f"Roll back in {parent / 'vllm'}?", yes=opts.yes)
        with out.progress(None, "rolling back") as progress:
            report = apply_rollback(
                plan,
                force=opts.force,
                on_step=lambda name, number, total: progress.advance(f"{name} {number}/{total}"),
            )
    return _report(out, where, report, recovered)


def _where(opts: RollbackOptions, out: Output) -> Target | Path:
    """The target, or the folder that held a vLLM which is gone but for what is ours."""
    try:
        # with --target the interpreter does not matter, and may be gone
        where = TargetOptions(opts.where.target) if opts.where.target else opts.where
        return common.locate(where, out)
    except DeepInferError as error:
        if error.code != "vllm-not-found":
            raise
        from deepinfer_cli.detect.vllm import find_leftover

        left = find_leftover(target=opts.where.target, python=opts.where.python)
        if left is None:
            raise
        out.note(f"vLLM is gone from {left}; what DeepInfer left there is removed")
        return left


def _dry_run(opts: RollbackOptions, out: Output, where: Target | Path, state_dir: Path) -> Result:
    from deepinfer_cli.overlay.state import refuse_unwritable

    common.refuse_pending(state_dir, opts.where)
    plan = plan_rollback(where)
    if plan.nothing:
        out.line(NOTHING)
    else:
        _show(plan, out)
        plan.check(force=opts.force)
        refuse_unwritable(plan.site.parent, state_dir, [change.path for change in plan.changes])
        out.line(f"dry run: nothing was written; {plural(len(plan.changes), 'file')} would change")
    data = {
        "dry_run": True,
        "changes": [common.change_data(change) for change in plan.changes],
        "modified": list(plan.modified),
        "kept": list(plan.kept),
        "stale": plan.stale,
        "unrecorded": plan.unrecorded,
        "nothing": plan.nothing,
    }
    return Result("rollback", _target(where) | data)


def _show(plan: RollbackPlan, out: Output, *, silent: bool = False) -> None:
    if not silent:
        out.table(
            common.file_table(
                plan.changes, every_file=bool(out.verbose), hook="the four marked lines go", payload="deleted"
            )
        )
    if plan.site.leftover:
        out.line("vLLM was uninstalled since: only what is DeepInfer's goes")
    elif plan.stale or plan.site.moved(plan.record):
        out.line(
            "vLLM was reinstalled or upgraded since: nothing old is written, only what is DeepInfer's goes"
        )
    if plan.unrecorded:
        out.line(
            "there is no record: what is removed was checked against vLLM's own hashes and this DeepInfer's overlay"
        )
    for text in plan.notes:
        out.warn(text)


def _report(out: Output, where: Target | Path, report: RollbackReport, recovered: str | None) -> Result:
    changed = not report.nothing
    if changed:
        out.line(
            f"rolled back: {plural(len(report.restored), 'file')} restored, "
            f"{plural(len(report.removed), 'file')} removed"
        )
    else:
        out.line(NOTHING)
    for path in report.kept:
        out.warn(f"not DeepInfer's, and left where it is: {path}")
    for path in report.copies:
        out.warn(f"your edited file was kept as {path}")
    data: dict[str, Any] = {
        "dry_run": False,
        "nothing": report.nothing,
        "restored": list(report.restored),
        "removed": list(report.removed),
        "kept": list(report.kept),
        "copies": list(report.copies),
        "stale": report.stale,
        "unrecorded": report.unrecorded,
        "recovered": recovered,
        "restart": common.say_restart(where.root, out) if changed and isinstance(where, Target) else [],
    }
    return Result("rollback", _target(where) | data)


def _target(where: Target | Path) -> dict[str, Any]:
    if isinstance(where, Target):
        return {"target": common.target_data(where)}
    return {"target": {"root": str(where / "vllm"), "kind": "leftover"}}
