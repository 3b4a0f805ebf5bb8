"""`deepinfer install`: plan, show, confirm, write, check, report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli.commands import common, install_show, install_wheel, livecheck
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.arch import ArchDecision, arch_name, resolve_archs
from deepinfer_cli.detect.gpu import GpuReport, detect_gpus
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import ExitCode, UnsupportedError, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay.plan import Plan
from deepinfer_cli.overlay.record import Record
from deepinfer_cli.render import plural, size, table
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
    # a wrong path is said before what the machine lacks, and what it lacks before a download
    named = None if opts.wheel else install_wheel.target_of(opts, out)
    gpus = detect_gpus()
    decision = resolve_archs(gpus, opts.arch)
    for text in decision.warnings:
        out.warn(text)
    target = named or install_wheel.target_of(opts, out)
    if opts.dry_run:
        return _dry_run(opts, out, target, decision)
    asked = False
    if opts.into and not install_wheel.is_there(opts.into):
        # what is refused or declined leaves no tree behind
        _, plan = _plan(target, opts)
        install_show.show(plan, decision, out, silent=out.quiet and opts.yes)
        out.require_yes(f"Install into {opts.into}?", yes=opts.yes)
        target, asked = install_wheel.fetch(opts, out), True
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
                install_show.show(plan, decision, out, silent=out.quiet and opts.yes)
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
    if opts.arch is not None:
        arch_name(opts.arch)


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
        install_show.show(plan, decision, out)
        out.line(f"dry run: nothing was written; {plural(len(plan.writes), 'file')} would change")
    else:
        out.line(install_show.already(record))
        if install_show.new_archs(record, decision):
            text = install_show.for_archs("would be", record.arch, decision.archs)
            out.line(f"{text}; no other file changes")
        install_show.warn_lost(plan, out)
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


def _apply(plan: Plan, decision: ArchDecision, opts: InstallOptions, out: Output) -> Record:
    from deepinfer_cli.overlay.transaction import apply_install

    with out.progress(None, "installing") as progress:
        return apply_install(
            plan,
            archs=decision.archs,
            on_step=lambda name, number, total: progress.advance(f"{name} {number}/{total}"),
        )


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
        install_show.say_done(out, record, before, decision)
        install_show.warn_lost(plan, out)
    else:
        verb = "adopted" if plan.adopts else "installed"
        out.line(f"{verb} overlay {record.overlay_version} in {target.root}: {install_show.counts(plan)}")
        if before is not None and before.arch != record.arch:
            out.line(install_show.for_archs("is now", before.arch, record.arch))
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
