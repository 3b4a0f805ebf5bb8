"""What `deepinfer install` says: its plan, what it did, and what was there before."""

from __future__ import annotations

from deepinfer_cli.commands import common
from deepinfer_cli.detect.arch import ArchDecision
from deepinfer_cli.output import Output
from deepinfer_cli.overlay.changes import Action
from deepinfer_cli.overlay.plan import Plan, lost_notes
from deepinfer_cli.overlay.record import Record
from deepinfer_cli.render import joined, plural


def show(plan: Plan, decision: ArchDecision, out: Output, *, silent: bool = False) -> None:
    """The plan: ops, files, architectures, and what is worth a warning; `silent` leaves the warnings."""
    if not silent:
        for content in common.plan_tables(plan, every_file=bool(out.verbose)):
            out.table(content)
        out.line(f"for {joined(decision.archs)} ({decision.reason})")
        out.line(common.match_text(plan.match, plan.release, plan.target.version))
    if plan.upgrade_from:
        verb = "downgrades" if _is_older(plan.overlay_version, plan.upgrade_from) else "upgrades"
        out.line(f"{verb} overlay {plan.upgrade_from} to {plan.overlay_version}")
    for change in plan.accepts:
        out.warn(f"{change.path} was edited: it stays as it is, and rollback gives it back with the edit")
    for text in plan.notes:
        out.warn(text)


def _is_older(version: str, other: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) < Version(other)
    except InvalidVersion:
        return False


def already(record: Record) -> str:
    """That every file is in place."""
    return f"already installed: overlay {record.overlay_version}, {joined(record.ops) or 'no ops'}"


def new_archs(record: Record, decision: ArchDecision) -> bool:
    """Whether an install writes down other architectures, where it finds all files in place."""
    return not set(decision.archs) <= set(record.arch)


def for_archs(verb: str, before: tuple[str, ...], after: tuple[str, ...]) -> str:
    """What an install writes down of the architectures; `verb` such as `is now`."""
    return f"it {verb} recorded as installed for {joined(after)}, before for {joined(before)}"


def say_done(out: Output, record: Record, before: Record | None, decision: ArchDecision) -> None:
    """That all files were in place, and what became of the record all the same."""
    out.line(already(record))
    if before is not None and before.arch != record.arch:
        out.line(f"{for_archs('is now', before.arch, record.arch)}; no other file changes")
    elif new_archs(record, decision):
        out.warn(f"it stays recorded as installed for {joined(record.arch)}: nothing can be written there")


def warn_lost(plan: Plan, out: Output) -> None:
    """Says of each op that is left to stock what that means."""
    for text in lost_notes(plan.ops):
        out.warn(text)


def counts(plan: Plan) -> str:
    """What was written, in words."""
    words = {Action.ADD: "added", Action.REPLACE: "replaced", Action.REMOVE: "removed"}
    found: dict[str, int] = {}
    for change in plan.writes:
        word = "edited" if change.owner == "hook" else words[change.action]
        found[word] = found.get(word, 0) + 1
    return (
        ", ".join(f"{plural(count, 'file')} {word}" for word, count in sorted(found.items()))
        or "nothing to write"
    )
