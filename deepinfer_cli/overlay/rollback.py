"""Taking an install back: what happens to each file, by the record alone, and the transaction that does it.

- A file that is as installed gets its original bytes and mode; the owner is whoever owns it now.
- A file that was edited since is refused (`file-drift`) without `force`. With it the edited file is copied to
  `.deepinfer-kept-<time>-<id>/` beside `vllm` and the original is restored; where vLLM itself was replaced since, our
  block is taken out of the file and the edit stays in place.
- After a reinstall or an upgrade of vLLM nothing old is written: only what is ours goes.
- Without a record, our block and our files go only where the rest equals RECORD or HEAD, and where every file in our
  folder equals the file of the same name in the overlay that this DeepInfer came with. `force` does not change that.
- Files in our folder that we did not put there stay, and the folder with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_cli.overlay.changes import FileChange
from deepinfer_cli.overlay.engine import OnStep, Work, run
from deepinfer_cli.overlay.files import Owner
from deepinfer_cli.overlay.finish import clean
from deepinfer_cli.overlay.journal import Journal, Operation
from deepinfer_cli.overlay.payload import PAYLOAD_DIR
from deepinfer_cli.overlay.record import Record, encode
from deepinfer_cli.overlay.rollback_plan import RollbackPlan, plan_rollback
from deepinfer_cli.overlay.signals import interruptible
from deepinfer_cli.overlay.site import Site
from deepinfer_cli.overlay.transaction import Ids, refuse_pending

__all__ = ["RollbackPlan", "RollbackReport", "apply_rollback", "plan_rollback"]


@dataclass(frozen=True, slots=True)
class RollbackReport:
    """What a rollback did.

    Attributes:
        restored: files of vLLM that are without our block again.
        removed: files of ours that are gone.
        kept: files in our folder that are not ours and stayed, absolute.
        copies: copies of edited files, absolute.
    """

    restored: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    stale: bool = False
    unrecorded: bool = False
    nothing: bool = False
    notes: tuple[str, ...] = ()


def apply_rollback(
    plan: RollbackPlan, *, force: bool = False, on_step: OnStep | None = None
) -> RollbackReport:
    """Carry out `plan`; the caller holds the lock. On any exception the overlay is as installed as before.

    Args:
        force: roll back edited files too; copies are kept and listed in the report.
        on_step: called with (name, number, total) before each step.

    Raises:
        RefusedError: `file-drift` without `force`, `file-changed` when a file changed since it was planned.
        DeepInferError: nothing was changed, or (`restore-failed`) what could not be restored is named.
    """
    site = plan.site
    with interruptible():
        refuse_pending(site.state_dir)
        plan.check(force=force)
        if plan.nothing:
            clean(site.state_dir)
            return RollbackReport(nothing=True)
        ids = Ids.new()
        copies = {path: f"{ids.kept_dir}/{path}" for path in plan.modified}
        run(_work(plan, ids, copies), on_step)
    return RollbackReport(
        restored=tuple(each.path for each in plan.changes if each.owner == "hook"),
        removed=tuple(each.path for each in plan.changes if each.owner == "payload"),
        kept=tuple(str(site.parent / path) for path in plan.kept),
        copies=tuple(str(site.parent / copy) for copy in copies.values()),
        stale=plan.stale,
        unrecorded=plan.unrecorded,
        notes=plan.notes,
    )


def _work(plan: RollbackPlan, ids: Ids, copies: dict[str, str]) -> Work:
    site, record = plan.site, plan.record
    operations = tuple(
        Operation(
            each.path,
            each.owner,
            each.before_sha256,
            each.after_sha256,
            f"backups/{ids.transaction_id}/before/{each.path}" if each.before_sha256 else None,
        )
        for each in plan.changes
    )
    dropped = {PAYLOAD_DIR, *(record.created_dirs if record else ()), *(["vllm"] if site.leftover else [])}
    journal = Journal(
        kind="rollback",
        transaction_id=ids.transaction_id,
        created_at=ids.created_at,
        operations=operations,
        made_dirs=(),
        dropped_dirs=tuple(sorted(dropped)),
        copies=copies,
        kept_dir=ids.kept_dir,
        record_before=encode(record) if record else None,
        record_after=None,
    )
    contents = {each.path: each.content for each in plan.changes if each.content is not None}
    owners = {each.path: _owner(site, record, each) for each in plan.changes if each.content is not None}
    return Work(site.parent, site.state_dir, journal, contents, owners)


def _owner(site: Site, record: Record | None, change: FileChange) -> Owner:
    """The recorded mode of an original, and the owner the file has now: whole trees change hands."""
    file, entry = site.parent / change.path, record.entry(change.path) if record else None
    current = Owner.for_new_file(file) if change.before_sha256 is None else Owner.of(file)
    if entry is None or entry.mode is None or entry.original_sha256 != change.after_sha256:
        return current
    return Owner(entry.mode, current.uid, current.gid)
