"""The one writer: runs a transaction's steps in order, and undoes them when one fails.

Order: journal, copies of users' files, backups of all originals (each read back), all new files staged beside their
targets and compiled, then one rename per file (hooked files twice where one overlay replaces another), re-hash, empty
folders, record, and the journal's removal, which is the commit. Whatever is raised before the commit (also Ctrl-C and
SIGTERM) restores all files and is raised again; from the commit on, signals are ignored until the transaction has
ended.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deepinfer_cli.errors import FailedError, RefusedError
from deepinfer_cli.overlay.files import (
    Owner,
    hash_of,
    make_dirs,
    purge_bytecode,
    read,
    sync_dir,
    unlink_quietly,
    write_new,
)
from deepinfer_cli.overlay.finish import Step, clean, finish_steps
from deepinfer_cli.overlay.journal import Journal, Operation, pending, write_journal
from deepinfer_cli.overlay.payload import sha256
from deepinfer_cli.overlay.signals import shielded
from deepinfer_cli.overlay.state import preflight, write_error
from deepinfer_cli.overlay.undo import undo

OnStep = Callable[[str, int, int], None]
_COMMIT_STEPS = 2


def _step(name: str) -> None:
    """Called before each step of a transaction; tests raise or kill here."""


@dataclass(frozen=True, slots=True)
class Work:
    """One transaction, ready to run.

    Attributes:
        parent: the folder that contains `vllm`.
        contents: path → bytes after, for each operation that does not remove its file.
        owners: path → mode and owner after, likewise.
        vias: path → bytes without our block, for operations that go through them.
        saves: further backups, below `state_dir`: path → bytes and owner.
    """

    parent: Path
    state_dir: Path
    journal: Journal
    contents: dict[str, bytes]
    owners: dict[str, Owner]
    saves: dict[str, tuple[bytes, Owner]] = field(default_factory=dict)
    vias: dict[str, bytes] = field(default_factory=dict)


def run(work: Work, on_step: OnStep | None = None) -> None:
    """Check that all can be written, then do it; on any exception everything is as it was.

    Args:
        on_step: called with (name, number, total) before each step.

    Raises:
        DeepInferError: preflight, a changed file, a full disk, …; `restore-failed` names what could not be restored.
    """
    _check_unchanged(work)
    _preflight(work)
    steps = _steps(work)

    def do(number: int) -> None:
        name, action = steps[number]
        _step(name)
        if on_step is not None:
            on_step(name, number + 1, len(steps))
        action()

    try:
        for number in range(len(steps) - _COMMIT_STEPS):
            do(number)
        with shielded():
            for number in range(len(steps) - _COMMIT_STEPS, len(steps)):
                do(number)
    except BaseException as error:
        with shielded():
            _restore(work, error)
        if isinstance(error, OSError):
            raise write_error(error, Path(error.filename or work.parent)) from error
        raise


def _restore(work: Work, error: BaseException) -> None:
    # the disk decides, not how far we think we were: no journal means not begun, or committed
    if pending(work.state_dir) is None:
        clean(work.state_dir)
        return
    report = undo(work.journal, work.parent, work.state_dir)
    if report.failed:
        raise report.error() from error


def _check_unchanged(work: Work) -> None:
    changed = [
        item.path
        for item in work.journal.operations
        if hash_of(work.parent / item.path) != item.before_sha256
    ]
    if changed:
        raise changed_error(changed)


def changed_error(paths: list[str]) -> RefusedError:
    """The error for files that are no longer what was planned for."""
    return RefusedError(
        "files changed while this command was running",
        code="file-changed",
        hint="run the command again",
        paths=tuple(paths),
    )


def _preflight(work: Work) -> None:
    items = work.journal.operations
    backups = [(work.parent / item.path).stat().st_size for item in items if item.backup]
    saved = [len(content) for content, _ in work.saves.values()]
    sizes = {
        item.path: len(work.contents.get(item.path, b"")) + len(work.vias.get(item.path, b""))
        for item in items
    }
    if work.journal.copies:
        sizes[f"{work.journal.kept_dir}/copies"] = sum(backups)
    preflight(work.parent, work.state_dir, sizes, [*backups, *saved])


def _steps(work: Work) -> list[Step]:
    journal, parent = work.journal, work.parent
    steps: list[Step] = [("journal", partial(_begin, work))]
    for path, copy in journal.copies.items():
        steps.append((f"keep {path}", partial(_copy, parent / path, parent / copy)))
    for item in journal.operations:
        if item.backup:
            steps.append((f"backup {item.path}", partial(_backup, work, item)))
    for name, (content, owner) in work.saves.items():
        steps.append((f"save {name}", partial(_save, work.state_dir / name, content, owner)))
    staged = [item for item in journal.operations if item.after_sha256 is not None]
    steps += [(f"stage {item.path}", partial(_stage, work, item)) for item in staged]
    steps.append(("flush backups", partial(_flush_backups, work)))
    vias = [item for item in journal.operations if item.via_sha256]
    steps += [(f"unhook {item.path}", partial(_unhook, work, item)) for item in vias]
    before = None
    for item in journal.operations:
        if before is not None and before.owner != item.owner:
            steps.append((f"flush {before.owner} files", partial(_flush, work, before.owner)))
        steps.append((f"replace {item.path}", partial(_replace, work, item)))
        before = item
    steps.append(("verify", partial(_verify, work)))
    return steps + finish_steps(journal, parent, work.state_dir)


def _begin(work: Work) -> None:
    make_dirs(work.state_dir)
    write_journal(work.state_dir, work.journal)


def _copy(source: Path, copy: Path) -> None:
    _save(copy, source.read_bytes(), Owner.of(source))


def _backup(work: Work, item: Operation) -> None:
    source = work.parent / item.path
    content = source.read_bytes()
    if sha256(content) != item.before_sha256:
        raise changed_error([item.path])
    _save(work.state_dir / (item.backup or ""), content, Owner.of(source))


def _save(path: Path, content: bytes, owner: Owner) -> None:
    make_dirs(path.parent)
    write_new(path, content, owner)
    if read(path) != content:
        raise FailedError(
            "a backup does not read back as it was written", code="backup-failed", paths=(path,)
        )


def _stage(work: Work, item: Operation) -> None:
    content = work.contents[item.path]
    if item.path.endswith(".py"):
        _compile(item.path, content, read(work.parent / item.path))
    path = work.parent / item.path
    make_dirs(path.parent)
    owner = work.owners[item.path]
    write_new(work.journal.temp(work.parent, item.path), content, owner)
    if item.via_sha256:
        write_new(work.journal.temp(work.parent, item.path, "via"), work.vias[item.path], owner)


def _compile(path: str, content: bytes, before: bytes | None) -> None:
    """Refuse a file that does not compile; vLLM's own may be written for a newer Python than this one."""
    problem = _syntax_error(path, content)
    if problem is not None and (before is None or _syntax_error(path, before) is None):
        raise FailedError(f"does not compile: {problem}", code="compile-failed", paths=(path,)) from problem


def _syntax_error(path: str, content: bytes) -> SyntaxError | ValueError | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(content, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            return error
    return None


def _unhook(work: Work, item: Operation) -> None:
    path = work.parent / item.path
    if hash_of(path) != item.before_sha256:
        raise changed_error([item.path])
    work.journal.temp(work.parent, item.path, "via").replace(path)
    purge_bytecode(path)


def _replace(work: Work, item: Operation) -> None:
    path = work.parent / item.path
    if hash_of(path) != (item.via_sha256 or item.before_sha256):
        raise changed_error([item.path])
    if item.after_sha256 is None:
        unlink_quietly(path)
    else:
        work.journal.temp(work.parent, item.path).replace(path)
    purge_bytecode(path)


def _flush(work: Work, owner: str) -> None:
    folders = {(work.parent / item.path).parent for item in work.journal.operations if item.owner == owner}
    for folder in sorted(folders):
        if folder.is_dir():
            sync_dir(folder)


def _flush_backups(work: Work) -> None:
    for folder in sorted({path.parent for path in (work.state_dir / "backups").rglob("*")}):
        sync_dir(folder)


def _verify(work: Work) -> None:
    wrong = [
        item.path for item in work.journal.operations if hash_of(work.parent / item.path) != item.after_sha256
    ]
    if wrong:
        raise FailedError("files are not what was written", code="verify-failed", paths=tuple(wrong))
    for owner in {item.owner for item in work.journal.operations}:
        _flush(work, owner)
