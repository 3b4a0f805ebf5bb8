"""Applying an install plan: what the record will say, and the transaction that makes it true."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath

from deepinfer_cli import __version__
from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import hook
from deepinfer_cli.overlay.engine import OnStep, Work, changed_error, run
from deepinfer_cli.overlay.files import Owner, hash_of, read
from deepinfer_cli.overlay.journal import Journal, Operation, pending
from deepinfer_cli.overlay.payload import PAYLOAD_DIR, sha256
from deepinfer_cli.overlay.plan import Action, FileChange, Plan
from deepinfer_cli.overlay.record import FileEntry, Record, RecordTarget, encode, read_record
from deepinfer_cli.overlay.signals import interruptible


@dataclass(frozen=True, slots=True)
class Ids:
    """Name and time of one transaction."""

    transaction_id: str
    created_at: str
    kept_dir: str

    @classmethod
    def new(cls) -> Ids:
        """Fresh ones."""
        name, now = secrets.token_hex(6), datetime.now(timezone.utc)
        return cls(
            name, now.isoformat(timespec="seconds"), f".deepinfer-kept-{now:%Y%m%dT%H%M%SZ}-{name[:4]}"
        )


def apply_install(plan: Plan, *, archs: tuple[str, ...], on_step: OnStep | None = None) -> Record:
    """Carry out `plan`; the caller holds the lock. On any exception everything is as it was before.

    Copies of files that a user had changed (a plan with `force`) are kept in `.deepinfer-kept-<time>-<id>/` beside `vllm`;
    `Record.kept` lists them.

    Args:
        archs: the architectures this install is for.
        on_step: called with (name, number, total) before each step.

    Raises:
        DeepInferError: nothing was changed, or (`restore-failed`) what could not be restored is named.
    """
    with interruptible():
        state_dir = plan.target.state_dir
        refuse_pending(state_dir)
        old = read_record(state_dir)
        done = not (plan.writes or plan.accepts or plan.adopts)
        if old is not None and done and set(archs) <= set(old.arch):
            return old
        install = _Install(plan, archs, old, Ids.new())
        work, record = install.prepare()
        run(work, on_step)
        return record


def refuse_pending(state_dir: Path) -> None:
    """Refuse to write over an unfinished transaction.

    Raises:
        FailedError: `transaction-interrupted`; `recover` comes first.
    """
    if pending(state_dir) is not None:
        raise FailedError(
            "an earlier install or rollback was interrupted",
            code="transaction-interrupted",
            hint="run `deepinfer install` or `deepinfer rollback`: both recover first",
        )


def order(change: FileChange) -> tuple[int, bool]:
    """Sort key: hooks that go, new payload files, replaced ones (`__init__.py` last), removed ones, then hooks."""
    if change.owner == "hook":
        return (0 if change.after_sha256 == change.pristine_sha256 else 4, False)
    rank = {Action.ADD: 1, Action.REMOVE: 3}.get(change.action, 2)
    return (rank, change.path == f"{PAYLOAD_DIR}/__init__.py")


class _Install:
    """One install being prepared: reads, never writes."""

    def __init__(self, plan: Plan, archs: tuple[str, ...], old: Record | None, ids: Ids) -> None:
        self.plan, self.archs, self.old, self.ids = plan, archs, old, ids
        self.parent, self.state_dir = plan.target.parent, plan.target.state_dir
        self.changes = sorted(plan.changes, key=order)
        self.current = {change.path: read(self.parent / change.path) for change in self.changes}
        self.saves: dict[str, tuple[bytes, Owner]] = {}

    def prepare(self) -> tuple[Work, Record]:
        """The transaction and the record it will leave."""
        self._check_kept_files()
        entries = [entry for change in self.changes if (entry := self._entry(change))]
        entries += self._carried({change.path for change in self.changes})
        vias = self._vias()
        touched = [each for each in self.changes if each.action is not Action.KEEP or each.path in vias]
        operations = tuple(self._operation(change, entries, vias) for change in touched)
        copies = self._copies()
        made = self._missing_dirs()
        record = self._record(tuple(entries), made, copies)
        journal = Journal(
            kind="install",
            transaction_id=self.ids.transaction_id,
            created_at=self.ids.created_at,
            operations=operations,
            made_dirs=made,
            dropped_dirs=self._dropped_dirs(entries),
            copies=copies,
            kept_dir=self.ids.kept_dir,
            record_before=encode(self.old) if self.old else None,
            record_after=encode(record),
        )
        contents = {each.path: each.content for each in touched if each.content is not None}
        owners = {path: self._owner(path) for path in contents}
        work = Work(self.parent, self.state_dir, journal, contents, owners, self.saves, vias)
        return work, record

    def _vias(self) -> dict[str, bytes]:
        """Hooked files whose block is out while the payload they import is being replaced."""
        if not any(each.owner == "payload" and each.before_sha256 for each in self.plan_writes()):
            return {}
        hooks = [each for each in self.changes if each.owner == "hook" and order(each)[0] > 0]
        found = {each.path: (each, self.current[each.path] or b"") for each in hooks}
        return {
            path: _original(each, content)[1] for path, (each, content) in found.items() if hook.find(content)
        }

    def plan_writes(self) -> list[FileChange]:
        """The changes that touch the disk, in the order in which they do."""
        return [change for change in self.changes if change.action is not Action.KEEP]

    def _check_kept_files(self) -> None:
        changed = [
            each.path for each in self.changes if each.before_sha256 != hash_of(self.parent / each.path)
        ]
        if changed:
            raise changed_error(changed)

    def _owner(self, path: str) -> Owner:
        file = self.parent / path
        return Owner.of(file) if self.current[path] is not None else Owner.for_new_file(file)

    def _entry(self, change: FileChange) -> FileEntry | None:
        applied = change.before_sha256 if change.action is Action.KEEP else change.after_sha256
        if applied is None or (change.owner == "hook" and applied == change.pristine_sha256):
            return None
        if change.owner == "payload":
            return FileEntry(change.path, "payload", None, applied)
        return self._hook_entry(change, applied)

    def _hook_entry(self, change: FileChange, applied: str) -> FileEntry:
        content = self.current[change.path] or b""
        original, plain = _original(change, content)
        old = self.old.entry(change.path) if self.old else None
        # an upgrade keeps the backup of the first install
        if old and old.backup and old.original_sha256 == original == hash_of(self.state_dir / old.backup):
            return FileEntry(change.path, "hook", original, applied, old.backup, old.mode, old.uid, old.gid)
        owner = Owner.of(self.parent / change.path)
        backup = f"backups/{self.ids.transaction_id}/{change.path}"
        if plain != content or change.action is Action.KEEP:
            self.saves[backup] = (plain, owner)
        return FileEntry(change.path, "hook", original, applied, backup, owner.mode, owner.uid, owner.gid)

    def _carried(self, planned: set[str]) -> list[FileEntry]:
        """Entries of the old record that the plan does not mention and that are still as installed."""
        old = self.old.files if self.old else ()
        return [
            entry
            for entry in old
            if entry.path not in planned and hash_of(self.parent / entry.path) == entry.applied_sha256
        ]

    def _operation(self, change: FileChange, entries: list[FileEntry], vias: dict[str, bytes]) -> Operation:
        backup = None
        if change.before_sha256 is not None:
            backup = f"backups/{self.ids.transaction_id}/before/{change.path}"
            same = (each for each in entries if each.path == change.path)
            if any(entry.original_sha256 == change.before_sha256 and entry.backup for entry in same):
                backup = f"backups/{self.ids.transaction_id}/{change.path}"
        via = sha256(vias[change.path]) if change.path in vias else None
        return Operation(change.path, change.owner, change.before_sha256, change.after_sha256, backup, via)

    def _copies(self) -> dict[str, str]:
        edited = (change.path for change in self.plan_writes() if change.edited)
        return {path: f"{self.ids.kept_dir}/{path}" for path in edited}

    def _missing_dirs(self) -> tuple[str, ...]:
        files = [change.path for change in self.plan_writes() if change.content is not None]
        return tuple(folder for folder in folders_of(files) if not (self.parent / folder).is_dir())

    def _dropped_dirs(self, entries: list[FileEntry]) -> tuple[str, ...]:
        needed = set(folders_of(entry.path for entry in entries))
        return tuple(folder for folder in (self.old.created_dirs if self.old else ()) if folder not in needed)

    def _created_dirs(self, entries: tuple[FileEntry, ...], made: tuple[str, ...]) -> tuple[str, ...]:
        needed = folders_of(entry.path for entry in entries if entry.owner == "payload")
        before = set(self.old.created_dirs if self.old else ()) | set(made)
        ours = self.plan.adopts
        return tuple(
            folder for folder in needed if folder in before or (ours and folder.startswith(PAYLOAD_DIR))
        )

    def _record(
        self, entries: tuple[FileEntry, ...], made: tuple[str, ...], copies: dict[str, str]
    ) -> Record:
        target, plan, old = self.plan.target, self.plan, self.old
        kept = tuple(str(self.parent / copy) for copy in copies.values())
        return Record(
            deepinfer_version=__version__,
            overlay_version=plan.overlay_version,
            payload_digest=plan.payload_digest,
            transaction_id=self.ids.transaction_id,
            created_at=self.ids.created_at,
            target=RecordTarget(str(target.root), target.kind.value, target.version, target.layout),
            release=plan.release,
            match=plan.match,
            ops=tuple(op.name for op in plan.ops if op.installed),
            skip=plan.skip,
            arch=self.archs,
            files=entries,
            created_dirs=self._created_dirs(entries, made),
            adopted=plan.adopts or bool(old and old.adopted),
            kept=(*(old.kept if old else ()), *kept),
        )


def _original(change: FileChange, content: bytes) -> tuple[str, bytes]:
    """Hash and bytes of a hooked file without our block, as the plan says it was."""
    candidates = hook.originals(content) if hook.find(content) else (content,)
    wanted = change.pristine_sha256 or sha256(candidates[0])
    for plain in candidates:
        if sha256(plain) == wanted:
            return wanted, plain
    raise FailedError(
        "a hooked file without our block is not what the plan says",
        code="plan-mismatch",
        hint="run the command again",
        paths=(change.path,),
    )


def folders_of(paths: Iterable[str]) -> tuple[str, ...]:
    """Every folder above the given posix paths, parents first."""
    folders = {str(above) for path in paths for above in PurePosixPath(path).parents}
    return tuple(sorted(folders - {"."}))
