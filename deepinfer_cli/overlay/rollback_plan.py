"""What a rollback would do to each file, by the record alone. Reads, never writes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_cli.detect.vllm import Target, TargetKind
from deepinfer_cli.errors import RefusedError
from deepinfer_cli.overlay import hook
from deepinfer_cli.overlay import payload as payloads
from deepinfer_cli.overlay.changes import Action, FileChange, files
from deepinfer_cli.overlay.files import read
from deepinfer_cli.overlay.inspect import has_ours
from deepinfer_cli.overlay.patchfile import git_apply
from deepinfer_cli.overlay.payload import PAYLOAD_DIR, sha256
from deepinfer_cli.overlay.record import FileEntry, Record, read_record
from deepinfer_cli.overlay.site import (
    FileState,
    Site,
    extra_files,
    file_state,
    hooked_files,
    without_lines,
)


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """Everything one rollback does, hooks first.

    Attributes:
        site: where; `site.parent` contains `vllm`.
        record: the record it goes by, None when there is none.
        modified: files that were edited since; rolling back needs `force` and keeps a copy of each.
        kept: files in our folder that are not ours; they stay.
        stale: vLLM was reinstalled or upgraded since, at least in part.
        unrecorded: there is an overlay but no record.
        nothing: there is nothing to roll back.
    """

    site: Site
    record: Record | None
    changes: tuple[FileChange, ...] = ()
    modified: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    stale: bool = False
    unrecorded: bool = False
    nothing: bool = False
    notes: tuple[str, ...] = ()

    def check(self, *, force: bool) -> None:
        """Refuse edited files.

        Raises:
            RefusedError: `file-drift`, without `force`.
        """
        if self.modified and not force:
            raise RefusedError(
                f"{files(self.modified)} edited since the install",
                code="file-drift",
                hint="undo the edits, or pass --force: a copy of each is kept beside vllm",
                paths=tuple(self.site.parent / path for path in self.modified),
            )


def plan_rollback(where: Target | Path) -> RollbackPlan:
    """What rolling back `where` would do.

    Args:
        where: a target, or the folder that contained a vLLM which is gone.

    Raises:
        RefusedError: `backup-missing`, or `not-verifiable` for an overlay without a record.
        FailedError: the record cannot be read.
    """
    site = Site.of(where)
    record = read_record(site.state_dir)
    planner = _Planner(site, record)
    return planner.plan()


@dataclass(slots=True)
class _Planner:
    site: Site
    record: Record | None
    hooks: list[FileChange] = field(default_factory=list)
    payload: list[FileChange] = field(default_factory=list)
    modified: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale: bool = False

    def plan(self) -> RollbackPlan:
        known = {entry.path for entry in self.record.files} if self.record else set()
        if self.record is not None:
            for entry in self.record.files:
                self._recorded(entry, self.record)
        strays = [path for path, _ in hooked_files(self.site.parent) if path not in known]
        self._strays(strays)
        extra = extra_files(self.site, known)
        kept: tuple[str, ...] = extra
        if self.record is None:
            kept = self._unknown_payload(extra)
        unrecorded = self.record is None and bool(self.hooks or self.payload)
        return RollbackPlan(
            site=self.site,
            record=self.record,
            changes=(*self.hooks, *self.payload),
            modified=tuple(self.modified),
            kept=kept,
            stale=self.stale,
            unrecorded=unrecorded,
            nothing=self.record is None
            and not unrecorded
            and (bool(kept) or not (self.site.parent / PAYLOAD_DIR).is_dir()),
            notes=tuple(self.notes),
        )

    def _recorded(self, entry: FileEntry, record: Record) -> None:
        state, _ = file_state(entry, self.site, record)
        content = read(self.site.parent / entry.path)
        if state is FileState.MODIFIED:
            self.modified.append(entry.path)
        if entry.owner == "payload":
            if content is not None:
                note = "deleted, with your edit; --force keeps a copy" if state is FileState.MODIFIED else ""
                self.payload.append(_change(entry.path, "payload", content, None, note))
            return
        moved = self.site.moved(record)
        if state in (FileState.STALE, FileState.PRISTINE) or (moved and state is not FileState.APPLIED):
            self.stale = True
        if state is FileState.PRISTINE or (state is FileState.MISSING and moved):
            return
        after = self._after(entry, state, content or b"", moved=moved)
        if after != content:
            note = ""
            if state is FileState.MISSING:
                note = "the original is put back"
            elif state is FileState.MODIFIED and not moved:
                note = "the original is put back, your edit goes; --force keeps a copy"
            elif state is FileState.MODIFIED:
                note = "the four marked lines go, your edit stays; --force keeps a copy"
            self.hooks.append(_change(entry.path, "hook", content, after, note))

    def _after(self, entry: FileEntry, state: FileState, content: bytes, *, moved: bool) -> bytes:
        if state is FileState.STALE:
            origin = self.site.origin(entry.path)
            plain = without_lines(content, {origin} if origin else set())
            return content if plain is None else plain
        if state is FileState.MODIFIED and moved:
            return hook.strip(content)
        # for a file as installed this is what the backup holds; it works without one
        for plain in hook.originals(content) if state is FileState.APPLIED else ():
            if sha256(plain) == entry.original_sha256:
                return plain
        backup = read(self.site.state_dir / entry.backup) if entry.backup else None
        if backup is None or sha256(backup) != entry.original_sha256:
            raise RefusedError(
                "the backup of a file that must be restored is missing or damaged",
                code="backup-missing",
                hint=f"{reinstall_hint(self.site)}, then run `deepinfer rollback --target "
                f"{shlex.quote(str(self.site.parent))}` again",
                paths=(self.site.parent / entry.path,),
            )
        return backup

    def _strays(self, paths: list[str]) -> None:
        """Hooks that no record names: `git apply`, `cp -r`, or a lost state folder."""
        unknown = []
        for path in paths:
            content = (self.site.parent / path).read_bytes()
            origin = self.site.origin(path)
            plain = without_lines(content, {origin} if origin else set())
            if plain is None:
                unknown.append(path)
            else:
                self.hooks.append(_change(path, "hook", content, plain))
        if unknown:
            raise self._not_verifiable(unknown, "hooked without a record, and the rest is not vLLM's own")

    def _unknown_payload(self, present: tuple[str, ...]) -> tuple[str, ...]:
        """Plans for a folder that no record describes; what it returns is a user's alone and stays."""
        if not present:
            return ()
        bundled = payloads.bundled()
        if not has_ours(present, bundled):
            return present
        wrong = []
        for path in present:
            file = self.site.parent / path
            if file.is_symlink() or not file.is_file():
                wrong.append(path)
                continue
            change = _change(path, "payload", file.read_bytes(), None)
            self.payload.append(change)
            if bundled.files.get(path.removeprefix(f"{PAYLOAD_DIR}/")) != change.before_sha256:
                wrong.append(path)
        if wrong:
            found = payloads.load(self.site.parent / PAYLOAD_DIR).version or "unknown"
            raise self._not_verifiable(
                wrong,
                f"in the overlay's folder (version {found}) without a record, and not as in this DeepInfer's "
                f"{bundled.version}",
            )
        return ()

    def _not_verifiable(self, paths: list[str], what: str) -> RefusedError:
        target = self.site.target
        undo = git_apply(self.site.parent, "-R", "FILE", checkout=bool(target and target.git_dir))
        hint = (
            f"{reinstall_hint(self.site)}, and delete {self.site.parent / PAYLOAD_DIR} by hand; if it came from "
            f"`git apply`: `{undo}`"
        )
        return RefusedError(
            f"{files(paths)} {what}",
            code="not-verifiable",
            hint=hint,
            paths=tuple(self.site.parent / path for path in paths),
        )


def _change(path: str, owner: str, before: bytes | None, after: bytes | None, note: str = "") -> FileChange:
    action = Action.REMOVE if after is None else Action.ADD if before is None else Action.REPLACE
    hashes = [None if each is None else sha256(each) for each in (before, after)]
    return FileChange(path, action, owner, hashes[0], hashes[1], after, note=note)


def reinstall_hint(site: Site) -> str:
    """What gives back vLLM's own files."""
    target = site.target
    if target is not None and target.git_dir is not None:
        return f"run `git -C {site.parent} checkout -- <the file>`"
    version = site.version.partition("+")[0] if site.version else None
    if target is not None and target.kind is TargetKind.TREE:
        return f"put back the files of the vLLM {version or ''} wheel".replace("  ", " ")
    own = site.parent.parents[2] / "bin" / "python" if len(site.parent.parents) > 2 else None
    python: Path | str | None = target.python if target is not None else None
    if python is None:
        python = own if own and own.exists() else "<its own python>"
    return (
        f"run `{python} -m pip install --force-reinstall --no-deps vllm{f'=={version}' if version else ''}`"
    )
