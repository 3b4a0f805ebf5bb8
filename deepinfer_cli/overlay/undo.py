"""Putting back what an unfinished transaction changed, by its journal.

It goes through the operations backwards. A file that someone changed since is neither ours nor the original: it
stays as it is and is reported, and a copy of what the transaction found there is kept beside `vllm`. One thing is
still done to it: when our payload goes away, our block is taken out of it, because the module could not be imported
otherwise (a copy with the block is kept too).

Running it again is safe at every point, also after it was killed itself.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import hook
from deepinfer_cli.overlay import journal as journals
from deepinfer_cli.overlay.files import (
    Owner,
    hash_of,
    make_dirs,
    purge_bytecode,
    read,
    remove_dir,
    remove_empty_package,
    sync_dir,
    unlink_quietly,
    write_atomically,
    write_new,
)
from deepinfer_cli.overlay.finish import clean, drop_temps, put_record
from deepinfer_cli.overlay.journal import Journal, Operation
from deepinfer_cli.overlay.payload import sha256


def _step(name: str) -> None:
    """Called before each step of an undo; tests raise or kill here."""


@dataclass(slots=True)
class RecoveryReport:
    """What recovery did.

    Attributes:
        outcome: `nothing`, `undone` or `finished`.
        kind: the interrupted transaction, `install` or `rollback`; empty when there was none.
        restored: files that have their earlier content again, or are gone again.
        foreign: files that someone changed since; left as they are, except for our block in them.
        copies: copies kept of such files and of what was there before, absolute.
        failed: (file, its backup) that could not be restored; the journal stays.
    """

    outcome: str = "nothing"
    kind: str = ""
    restored: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def error(self) -> FailedError:
        """The error that names each file which could not be restored, and its backup."""
        return FailedError(
            "not every file could be restored; these were not",
            code="restore-failed",
            hint="remove the cause (permissions, space) and run the command again, or copy the backups by hand",
            paths=tuple(f"{path} (backup: {backup})" for path, backup in self.failed),
        )


@dataclass(frozen=True, slots=True)
class _Undo:
    """One undo in progress."""

    journal: Journal
    parent: Path
    state_dir: Path
    report: RecoveryReport

    def run(self) -> None:
        _step("temps")
        drop_temps(self.journal, self.parent)
        # hooks out before the payload is mixed, hooks back when it is whole again
        for item in self.journal.operations:
            if item.via_sha256:
                _step(f"unhook {item.path}")
                # on a full disk this is left out: it only matters until the loop below has ended
                with contextlib.suppress(OSError):
                    self._unhook(item)
        backwards = self.journal.operations[::-1]
        for item in sorted(backwards, key=lambda each: bool(each.via_sha256)):
            self._guarded(f"undo {item.path}", item, self._undo)
        if not self.report.failed:
            self._end()

    def _guarded(self, name: str, item: Operation, action: Callable[[Operation], None]) -> None:
        _step(name)
        try:
            action(item)
        except OSError:
            backup = str(self.state_dir / item.backup) if item.backup else "none: delete the file"
            if (item.path, backup) not in self.report.failed:
                self.report.failed.append((item.path, backup))

    def _end(self) -> None:
        try:
            _step("copies")
            self._drop_copies()
            for folder in reversed(self.journal.made_dirs):
                remove_empty_package(self.parent / folder)
            _step("record")
            put_record(self.state_dir, self.journal.record_before)
            _step("commit")
            (self.state_dir / journals.NAME).unlink(missing_ok=True)
            sync_dir(self.state_dir)
            _step("clean")
            clean(self.state_dir)
        except OSError as error:
            self.report.failed.append((str(error.filename or self.state_dir), str(self.state_dir)))

    def _unhook(self, item: Operation) -> None:
        path = self.parent / item.path
        current = read(path)
        if current is None or sha256(current) != item.after_sha256:
            return
        if item.after_sha256 == item.before_sha256 and not self._payload_touched():
            return
        if not item.backup or hash_of(self.state_dir / item.backup) != item.before_sha256:
            # killed before the backups: we have touched nothing, and could not put it back
            return
        plain = _matching(current, item.via_sha256)
        if plain is not None:
            self._write(item, plain, Owner.of(path))

    def _payload_touched(self) -> bool:
        payload = (item for item in self.journal.operations if item.owner == "payload")
        return any(hash_of(self.parent / item.path) != item.before_sha256 for item in payload)

    def _undo(self, item: Operation) -> None:
        path = self.parent / item.path
        current = read(path)
        now = None if current is None else sha256(current)
        if now == item.before_sha256:
            return
        if now not in (None, item.after_sha256, item.via_sha256) or self._was_never_ours(item, current):
            self._leave(item, current or b"")
            return
        if item.before_sha256 is None:
            unlink_quietly(path)
        else:
            self._put_back(item, current)
        purge_bytecode(path)
        if path.parent.is_dir():
            sync_dir(path.parent)
        self.report.restored.append(item.path)

    def _was_never_ours(self, item: Operation, current: bytes | None) -> bool:
        """A hooked file that is gone or plain, without a backup: backups come first, so it was someone else."""
        if item.owner != "hook" or (current is not None and hook.find(current)):
            return False
        return item.backup is not None and read(self.state_dir / item.backup) is None

    def _put_back(self, item: Operation, current: bytes | None) -> None:
        """The earlier content, from the backup; it is kept until all files are back."""
        path, backup = self.parent / item.path, self.state_dir / (item.backup or "")
        content = read(backup)
        make_dirs(path.parent)
        if content is None or sha256(content) != item.before_sha256:
            plain = _matching(current or b"", item.before_sha256)
            if plain is None:
                raise OSError(errno.EIO, "the backup is missing or damaged", str(backup))
            self._write(item, plain, Owner.of(path))
            return
        try:
            self._write(item, content, Owner.of(backup))
        except OSError:
            # renaming the backup itself needs no space
            backup.replace(path)

    def _write(self, item: Operation, content: bytes, owner: Owner) -> None:
        path, temp = self.parent / item.path, self.journal.temp(self.parent, item.path, "undo")
        unlink_quietly(temp)
        try:
            write_new(temp, content, owner)
            temp.replace(path)
        finally:
            unlink_quietly(temp)
        purge_bytecode(path)

    def _leave(self, item: Operation, current: bytes) -> None:
        before = read(self.state_dir / item.backup) if item.backup else None
        if before is not None:
            self._keep_copy(f"{item.path}.before", before)
        if item.owner == "hook" and hook.find(current) and not (before and hook.find(before)):
            self._keep_copy(item.path, current)
            self._write(item, hook.strip(current), Owner.of(self.parent / item.path))
        self.report.foreign.append(item.path)

    def _keep_copy(self, name: str, content: bytes) -> None:
        copy = keep_copy(self.parent / self.journal.kept_dir, name, content)
        self.report.copies.append(str(copy))

    def _drop_copies(self) -> None:
        """Remove the copies this transaction made, where the file itself is back."""
        before = {item.path: item.before_sha256 for item in self.journal.operations}
        for path, name in self.journal.copies.items():
            copy = self.parent / name
            if hash_of(self.parent / path) == before.get(path):
                unlink_quietly(copy)
            elif copy.exists():
                self.report.copies.append(str(copy))
            for folder in copy.parents:
                if folder.is_relative_to(self.parent / self.journal.kept_dir):
                    remove_dir(folder)


def undo(journal: Journal, parent: Path, state_dir: Path) -> RecoveryReport:
    """Restore what `journal`'s transaction changed, file by file; a failure is reported and the others go on."""
    report = RecoveryReport("undone", journal.kind)
    _Undo(journal, parent, state_dir, report).run()
    return report


def _matching(current: bytes, wanted: str | None) -> bytes | None:
    return next((plain for plain in hook.originals(current) if sha256(plain) == wanted), None)


def keep_copy(folder: Path, path: str, content: bytes) -> Path:
    """A copy of `content` below `folder`; one that is there already with other content is not touched."""
    number = 0
    while True:
        copy = folder / (f"{path}.{number}" if number else path)
        found = read(copy)
        if found is None:
            make_dirs(copy.parent)
            write_atomically(copy, content)
            return copy
        if found == content:
            return copy
        number += 1
