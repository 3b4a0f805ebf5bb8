"""What has to happen to each file: the payload's, and vLLM's that get a hook. Reads, never writes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_cli.detect.origin import Origin
from deepinfer_cli.detect.target import PACKAGE, Target
from deepinfer_cli.errors import RefusedError
from deepinfer_cli.overlay import hook
from deepinfer_cli.overlay.payload import PACKAGE as OVERLAY
from deepinfer_cli.overlay.payload import Payload, load, sha256

if TYPE_CHECKING:
    from deepinfer_cli.overlay.record import FileEntry, Record

PAYLOAD = "payload"
HOOK = "hook"


class Action(str, Enum):
    """What happens to a file."""

    ADD = "add"
    REPLACE = "replace"
    REMOVE = "remove"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file of a plan.

    Attributes:
        path: posix, relative to the parent of the vLLM package (`vllm/…`).
        action: what happens to it; KEEP when its bytes are right already.
        owner: `payload` (ours) or `hook` (vLLM's, with our block at its end).
        before_sha256: hash on disk now, None when it does not exist.
        after_sha256: hash after, None when it is removed.
        content: its bytes after, None when it is removed.
        pristine_sha256: of a hooked file, the hash without our block.
        note: what a user should know about it.
        edited: what is there now is neither vLLM's nor ours: a copy is kept before it is replaced.
    """

    path: str
    action: Action
    owner: str
    before_sha256: str | None
    after_sha256: str | None
    content: bytes | None
    pristine_sha256: str | None = None
    note: str = ""
    edited: bool = False


def payload_changes(
    target: Target, payload: Payload, record: Record | None, *, force: bool = False
) -> tuple[FileChange, ...]:
    """The payload's files, then files of an older payload that are gone now.

    Raises:
        RefusedError: `overlay-conflict` for files that are not ours, `file-drift` for ours that were edited.
    """
    recorded = _recorded(record, PAYLOAD)
    folder = f"{PACKAGE}/{OVERLAY}"
    wanted = {f"{folder}/{name}": name for name in sorted(payload.files)}
    _check_folders(target, folder, tuple(wanted))
    other = None if record else unrecorded_version(target)
    present = _present(target, folder)
    if other in (None, payload.version):
        # what else lies there is a user's and stays; only an overlay of another version may have had more files
        present &= {*wanted, *recorded}
    changes: list[FileChange] = []
    foreign: list[str] = []
    edited: list[str] = []
    for path in (*wanted, *sorted({*present, *recorded} - set(wanted))):
        before = _hash(target.path(path))
        content = payload.read(wanted[path]) if path in wanted else None
        after = sha256(content) if content is not None else None
        if before is None and content is None:
            continue
        ours = before in (None, after) or (path in recorded and recorded[path].applied_sha256 == before)
        if not ours:
            (edited if path in recorded else foreign).append(path)
        note = (
            "" if ours else "not DeepInfer's: a copy is kept" if path in foreign else "edited: a copy is kept"
        )
        action = _action(before, after)
        changes.append(FileChange(path, action, PAYLOAD, before, after, content, note=note, edited=not ours))
    if foreign and not force and other not in (None, payload.version):
        raise RefusedError(
            f"an overlay of version {other} is there without a record; this DeepInfer brings {payload.version}",
            code="overlay-conflict",
            hint="take it out with what brought it (that DeepInfer, or `git apply -R`), or pass --force to replace "
            "it and keep a copy of each file that differs",
            paths=tuple(target.path(path) for path in foreign),
        )
    if foreign and not force:
        raise RefusedError(
            f"{files(foreign)} not DeepInfer's where its overlay goes",
            code="overlay-conflict",
            hint="move them away, or pass --force to keep a copy and go on",
            paths=tuple(target.path(path) for path in foreign),
        )
    if edited and not force:
        raise _drift(target, edited, "edited after DeepInfer installed its overlay")
    return tuple(changes)


def hook_changes(
    target: Target,
    hooked: Iterable[str],
    others: Iterable[str],
    skip: tuple[str, ...],
    record: Record | None,
    *,
    force: bool = False,
) -> tuple[FileChange, ...]:
    """The files that get our block, and those of `others` that have one and must lose it.

    Raises:
        RefusedError: `file-drift` or `not-verifiable`.
    """
    recorded = _recorded(record, HOOK)
    origin = Origin.of(target)
    hooked = tuple(hooked)
    old = sorted({*others, *recorded} - set(hooked))
    changes: list[FileChange] = []
    edited: list[str] = []
    blocks: list[str] = []
    unknown: list[str] = []
    for path in (*hooked, *(path for path in old if _hash(target.path(path)) and _has_block(target, path))):
        source = target.path(path).read_bytes()
        expected = {origin.sha256(path), _accepted(target, record, recorded.get(path))} - {None}
        before = sha256(source)
        candidates = hook.originals(source) if hook.find(source) else (source,)
        pristine = next((item for item in candidates if sha256(item) in expected), None)
        note = "" if path in hooked else "hook taken out: no installed op needs it"
        users = False
        if pristine is None:
            (edited if expected else unknown).append(path)
            pristine, note, users = candidates[0], "not vLLM's own content: a copy is kept", True
        elif not _is_ours(source, pristine, recorded.get(path)):
            blocks.append(path)
            note, users = "our block was edited: a copy is kept", True
        after = hook.append(pristine, skip) if path in hooked else pristine
        after_hash = sha256(after)
        action = _action(before, after_hash)
        if users and action is Action.KEEP:
            note = "not vLLM's own content: stays as it is"
        changes.append(
            FileChange(path, action, HOOK, before, after_hash, after, sha256(pristine), note, users)
        )
    if edited and not force:
        original = (
            "the checkout's HEAD" if origin.source == "HEAD" else f"vLLM {target.version or ''}".rstrip()
        )
        # status does not ask git
        raise _drift(target, edited, f"not as in {original}", head=origin.source == "HEAD")
    if blocks and not force:
        raise _drift(target, blocks, "edited inside DeepInfer's block")
    if unknown and not force:
        raise RefusedError(
            f"{files(unknown)} of unknown origin: no RECORD row, no commit and no supported release lists them",
            code="not-verifiable",
            hint="reinstall vLLM from its wheel, or pass --force to keep a copy and go on",
            paths=tuple(target.path(path) for path in unknown),
        )
    return tuple(changes)


def refuse_missing(target: Target, paths: Iterable[str], record: Record | None) -> None:
    """Refuses a vLLM that lacks one of `paths`, or of the recorded hooks', although it was published with it.

    An install that went on would take the file's ops for unfit, and its new backups would replace the one of that file.

    Raises:
        RefusedError: `file-missing`, with and without `--force`.
    """
    same = record is not None and record.target.version == target.version
    recorded = set(_recorded(record, HOOK)) if same else set()
    origin = Origin.of(target)
    gone = [
        path
        for path in sorted({*paths, *recorded})
        if not target.path(path).exists() and (path in recorded or origin.sha256(path))
    ]
    if gone:
        version = f"vllm=={target.version}" if target.version else "vllm"
        back = (
            f"`deepinfer rollback --target {shlex.quote(str(target.parent))}` puts it back from its backup"
            if set(gone) <= recorded
            else f"reinstall vLLM: pip install --force-reinstall --no-deps {version}"
        )
        raise RefusedError(
            f"{files(gone)} missing that vLLM came with",
            code="file-missing",
            hint=f"{back}; then install again",
            paths=tuple(target.path(path) for path in gone),
        )


def unrecorded_version(target: Target) -> str | None:
    """What the payload on disk says of itself; for one that no record describes."""
    return load(target.path(f"{PACKAGE}/{OVERLAY}")).version


def _is_ours(source: bytes, pristine: bytes, entry: FileEntry | None) -> bool:
    """Whether what `source` has beyond `pristine` is nothing, or a block as an install writes it."""
    if source == pristine or (entry is not None and entry.applied_sha256 == sha256(source)):
        return True
    return source == hook.append(pristine, hook.skipped(source))


def _recorded(record: Record | None, owner: str) -> dict[str, FileEntry]:
    return {entry.path: entry for entry in record.files if entry.owner == owner} if record else {}


def _accepted(target: Target, record: Record | None, entry: FileEntry | None) -> str | None:
    """The original that an earlier install found, which `--force` may have accepted; void for another vLLM."""
    if record is None or entry is None or record.target.version != target.version:
        return None
    return entry.original_sha256


def _present(target: Target, folder: str) -> set[str]:
    """The files that lie in the payload's folder, bytecode left out."""
    root = target.path(folder)
    return {
        f"{folder}/{path.relative_to(root).as_posix()}"
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _has_block(target: Target, path: str) -> bool:
    return hook.find(target.path(path).read_bytes())


def _hash(path: Path) -> str | None:
    try:
        return sha256(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _action(before: str | None, after: str | None) -> Action:
    if before == after:
        return Action.KEEP
    if before is None:
        return Action.ADD
    return Action.REMOVE if after is None else Action.REPLACE


def _check_folders(target: Target, folder: str, wanted: tuple[str, ...]) -> None:
    """Refuse what no copy could save: links anywhere, files where folders go, folders where files go."""
    root = target.path(folder)
    folders = {
        root,
        *(parent for path in wanted for parent in target.path(path).parents if root in parent.parents),
    }
    wrong = {path for path in folders if path.is_symlink() or (path.exists() and not path.is_dir())}
    wrong |= {target.path(path) for path in wanted if target.path(path).is_dir()}
    wrong |= {path for path in root.rglob("*") if path.is_symlink()}
    if wrong:
        raise RefusedError(
            "links, files or folders are in the way of the overlay's own",
            code="overlay-conflict",
            hint="move them away",
            paths=tuple(sorted(wrong)),
        )


def files(paths: Sequence[str]) -> str:
    """`1 file is`, `2 files are`: how a message about `paths` begins."""
    return "1 file is" if len(paths) == 1 else f"{len(paths)} files are"


def _drift(target: Target, paths: list[str], what: str, *, head: bool = False) -> RefusedError:
    where = shlex.quote(str(target.parent))
    show = f"git -C {where} diff" if head else f"deepinfer status --target {where}"
    return RefusedError(
        f"{files(paths)} {what}",
        code="file-drift",
        hint=f"`{show}` shows what changed; undo the edits, or pass --force to keep a copy and go on",
        paths=tuple(target.path(path) for path in paths),
    )
