"""`deepinfer install`: plan, show, confirm, write, check, report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli.commands import common, livecheck
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.arch import ArchDecision, resolve_archs
from deepinfer_cli.detect.gpu import GpuReport, detect_gpus
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import ExitCode, RefusedError, UnsupportedError, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay.changes import Action
from deepinfer_cli.overlay.plan import Plan
from deepinfer_cli.overlay.record import Record
from deepinfer_cli.render import joined, plural, size, table
from deepinfer_cli.result import ErrorItem, Result

if TYPE_CHECKING:
    from deepinfer_cli.paths import Cache


@dataclass(frozen=True, slots=True)
class InstallOptions:
    """What `install` was asked to do.

    Attributes:
        where: the vLLM.
        arch: architecture instead of this machine's GPUs.
        partial: leave ops whose symbols differ to stock.
        wheel, into: fetch this vLLM release as a tree into this folder first.
        clear_caches: remove compile caches that the overlay makes stale.
        verify: run the child-process check afterwards.
    """

    where: TargetOptions = field(default_factory=TargetOptions)
    arch: str | None = None
    dry_run: bool = False
    yes: bool = False
    force: bool = False
    partial: bool = False
    wheel: str | None = None
    into: Path | None = None
    clear_caches: bool = False
    verify: bool = True


def run(opts: InstallOptions, out: Output) -> Result:
    """Installs, or shows what an install would do."""
    _check(opts)
    gpus = detect_gpus()
    decision = resolve_archs(gpus, opts.arch)
    for text in decision.warnings:
        out.warn(text)
    target = _target(opts, out)
    if opts.dry_run:
        return _dry_run(opts, out, target, decision)
    asked = False
    if opts.into and not _is_there(opts.into):
        # what is refused or declined leaves no tree behind
        _, plan = _plan(target, opts)
        _show(plan, decision, out, silent=out.quiet and opts.yes)
        out.require_yes(f"Install into {opts.into}?", yes=opts.yes)
        target, asked = _fetch(opts, out), True
    with common.interruptible(target, opts.where):
        return _install(opts, out, gpus, decision, target, asked=asked)


def _install(
    opts: InstallOptions,
    out: Output,
    gpus: GpuReport,
    decision: ArchDecision,
    target: Target,
    *,
    asked: bool,
) -> Result:
    from deepinfer_cli.overlay.journal import pending
    from deepinfer_cli.overlay.state import lock

    recovered = None
    try:
        with lock(target.state_dir):
            recovered = common.recover(target.parent, target.state_dir, out)
            before, plan = _plan(target, opts)
            already = _is_done(before, plan)
            if not already and not asked:
                _show(plan, decision, out, silent=out.quiet and opts.yes)
                question = "Adopt this overlay?" if plan.adopts else f"Install into {target.root}?"
                out.require_yes(question, yes=opts.yes)
            record = _apply(plan, decision, opts, out)
    except UnsupportedError as error:
        # where nothing may be written, not even a lock, it may still be installed already
        if error.code != "read-only" or pending(target.state_dir):
            raise
        before, plan = _plan(target, opts)
        if before is None or not _is_done(before, plan):
            raise
        already, record = True, before
    return _report(opts, out, gpus, decision, plan, record, before, already=already, recovered=recovered)


def _check(opts: InstallOptions) -> None:
    if (opts.wheel is None) != (opts.into is None):
        raise UsageError(
            "--wheel and --into go together",
            code="usage",
            hint="such as: deepinfer install --wheel 0.33.0 --into DIR",
        )
    if opts.wheel is not None and opts.where.target is not None:
        raise UsageError("--wheel makes its own target; leave --target out", code="usage")


def _target(opts: InstallOptions, out: Output) -> Target:
    if opts.wheel is None or opts.into is None:
        return common.locate(opts.where, out)

    from deepinfer_cli.detect.vllm import find_target
    from deepinfer_cli.detect.wheel import cached_tree, check_folder
    from deepinfer_cli.overlay.signals import interruptible

    if _is_there(opts.into):
        target = find_target(target=opts.into, python=opts.where.python)
        if not _same_version(target.version, opts.wheel):
            raise RefusedError(
                f"{opts.into} holds vLLM {target.version}, not {opts.wheel}",
                code="into-not-empty",
                hint="name another folder with --into",
            )
    else:
        check_folder(opts.into.resolve())
        with interruptible(), out.progress(None, f"vLLM {opts.wheel}") as progress:
            root = cached_tree(opts.wheel, on_progress=progress.say)
        target = find_target(target=root, python=opts.where.python)
    target = replace(target, reason=f"the files of the vLLM {opts.wheel} wheel")
    common.announce(replace(target, root=opts.into.resolve() / "vllm"), out)
    return target


def _is_there(into: Path) -> bool:
    """Whether an earlier run has put its tree there."""
    return (into / "vllm" / "__init__.py").is_file()


def _fetch(opts: InstallOptions, out: Output) -> Target:
    """The tree, unpacked where it is to be."""
    from deepinfer_cli.detect.vllm import find_target
    from deepinfer_cli.detect.wheel import fetch_tree
    from deepinfer_cli.overlay.signals import interruptible

    assert opts.wheel is not None
    assert opts.into is not None
    # SIGTERM, too, must not leave half a tree
    with interruptible(), out.progress(None, f"vLLM {opts.wheel}") as progress:
        root = fetch_tree(opts.wheel, opts.into, on_progress=progress.say)
    target = find_target(target=root, python=opts.where.python)
    return replace(target, reason=f"the files of the vLLM {opts.wheel} wheel")


def _same_version(found: str | None, asked: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        # `0.33` is 0.33.0 to pip
        return found is not None and Version(found) == Version(asked)
    except InvalidVersion:
        return found == asked


def _dry_run(opts: InstallOptions, out: Output, target: Target, decision: ArchDecision) -> Result:
    common.refuse_pending(target, opts.where)
    from deepinfer_cli.overlay.state import refuse_links, refuse_unwritable

    record, plan = _plan(target, opts)
    paths = [change.path for change in plan.writes]
    refuse_links(target.parent, paths)
    if paths and not opts.wheel:
        refuse_unwritable(target.parent, target.state_dir, paths)
    already = _is_done(record, plan)
    if record is None or not already:
        _show(plan, decision, out)
        out.line(f"dry run: nothing was written; {plural(len(plan.writes), 'file')} would change")
    else:
        out.line(_already(record))
        if _new_archs(record, decision):
            out.line(_for_archs("would be", record.arch, decision.archs))
        _warn_lost(plan, out)
    if opts.clear_caches:
        _show_caches(out, "would clear")
    data = {"dry_run": True, "target": common.target_data(target), "archs": list(decision.archs)}
    return Result("install", data | {"plan": common.plan_data(plan), "already_installed": already})


def _plan(target: Target, opts: InstallOptions) -> tuple[Record | None, Plan]:
    from deepinfer_cli.overlay import manifest, payload
    from deepinfer_cli.overlay.plan import plan_install
    from deepinfer_cli.overlay.record import read_record

    record = read_record(target.state_dir)
    bundled = payload.bundled()
    known = manifest.load(bundled.root / "manifest.toml")
    plan = plan_install(target, bundled, known, record=record, partial=opts.partial, force=opts.force)
    return record, plan


def _is_done(record: Record | None, plan: Plan) -> bool:
    return record is not None and not (plan.writes or plan.accepts)


def _show(plan: Plan, decision: ArchDecision, out: Output, *, silent: bool = False) -> None:
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


def _apply(plan: Plan, decision: ArchDecision, opts: InstallOptions, out: Output) -> Record:
    from deepinfer_cli.overlay.transaction import apply_install

    with out.progress(None, "installing") as progress:
        return apply_install(
            plan,
            archs=decision.archs,
            on_step=lambda name, number, total: progress.advance(f"{name} {number}/{total}"),
        )


def _already(record: Record) -> str:
    return f"already installed: overlay {record.overlay_version}, {joined(record.ops) or 'no ops'}"


def _new_archs(record: Record, decision: ArchDecision) -> bool:
    """Whether an install writes down other architectures, where it finds all files in place."""
    return not set(decision.archs) <= set(record.arch)


def _for_archs(verb: str, before: tuple[str, ...], after: tuple[str, ...]) -> str:
    return f"it {verb} recorded as installed for {joined(after)}, before for {joined(before)}; no other file changes"


def _say_done(out: Output, record: Record, before: Record | None, decision: ArchDecision) -> None:
    """That all files were in place, and what became of the record all the same."""
    out.line(_already(record))
    if before is not None and before.arch != record.arch:
        out.line(_for_archs("is now", before.arch, record.arch))
    elif _new_archs(record, decision):
        out.warn(f"it stays recorded as installed for {joined(record.arch)}: nothing can be written there")


def _warn_lost(plan: Plan, out: Output) -> None:
    from deepinfer_cli.overlay.plan import lost_notes

    for text in lost_notes(plan.ops):
        out.warn(text)


def _report(
    opts: InstallOptions,
    out: Output,
    gpus: GpuReport,
    decision: ArchDecision,
    plan: Plan,
    record: Record,
    before: Record | None,
    *,
    already: bool,
    recovered: str | None,
) -> Result:
    target = plan.target
    kept = record.kept[len(before.kept) if before else 0 :]
    if already:
        _say_done(out, record, before, decision)
        _warn_lost(plan, out)
    else:
        verb = "adopted" if plan.adopts else "installed"
        out.line(f"{verb} overlay {record.overlay_version} in {target.root}: {_counts(plan)}")
    for path in kept:
        out.warn(f"your edited file was kept as {path}")
    check = livecheck.check(target, record, gpus) if opts.verify else livecheck.not_asked()
    if check.checked or not already:
        out.line(check.sentence)
    data: dict[str, Any] = {
        "dry_run": False,
        "already_installed": already,
        "target": common.target_data(target),
        "archs": list(decision.archs),
        "archs_before": list(before.arch) if before else [],
        "plan": common.plan_data(plan),
        "kept": list(kept),
        "recovered": recovered,
        "check": check.data,
        "restart": [] if already else common.say_restart(target.root, out),
        "caches_cleared": _clear_caches(opts, out) if opts.clear_caches else [],
    }
    if check.failed:
        error = ErrorItem("not-bound", check.sentence, f"deepinfer rollback{opts.where.arguments}")
        return Result("install", data, ExitCode.FAILED, (error,))
    if not already:
        where = TargetOptions(target.parent, opts.where.python) if opts.into else opts.where
        out.note(f"next: deepinfer verify{common.with_own_python(where, target).arguments}")
    return Result("install", data)


def _counts(plan: Plan) -> str:
    """What was written, in words."""
    words = {Action.ADD: "added", Action.REPLACE: "replaced", Action.REMOVE: "removed"}
    counts: dict[str, int] = {}
    for change in plan.writes:
        word = "edited" if change.owner == "hook" else words[change.action]
        counts[word] = counts.get(word, 0) + 1
    return (
        ", ".join(f"{plural(count, 'file')} {word}" for word, count in sorted(counts.items()))
        or "nothing to write"
    )


def _clear_caches(opts: InstallOptions, out: Output) -> list[dict[str, Any]]:
    from deepinfer_cli.paths import clear

    found = _show_caches(out, "to clear")
    if not found:
        return []
    out.require_yes("Clear these caches?", yes=opts.yes)
    cleared = []
    for cache in found:
        cleared.append(
            {"name": cache.name, "path": str(cache.folder), "entries": clear(cache), "size_bytes": cache.size}
        )
    out.line(f"cleared {size(sum(cache.size for cache in found))} of compile caches")
    return cleared


def _show_caches(out: Output, what: str) -> list[Cache]:
    from deepinfer_cli.paths import caches

    found = [cache for cache in caches() if cache.entries]
    if not found:
        out.line("no compile caches to clear")
        return []
    rows = [(cache.name, size(cache.size), cache.folder, cache.variable) for cache in found]
    out.table(table(("Cache", ("Size", "right"), "Folder", "Variable"), rows, title=f"Caches {what}"))
    return found
