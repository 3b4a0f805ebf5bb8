"""What an install looks like on disk now: the state of each file and of the whole. Reads, never writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from deepinfer_cli.detect.vllm import Origin, Target, TargetKind
from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import hook
from deepinfer_cli.overlay import journal as journals
from deepinfer_cli.overlay import payload as payloads
from deepinfer_cli.overlay.files import hash_of, read
from deepinfer_cli.overlay.journal import Operation
from deepinfer_cli.overlay.payload import PACKAGE, Payload, sha256
from deepinfer_cli.overlay.record import FileEntry, Record, read_record

PAYLOAD_DIR = f"vllm/{PACKAGE}"
# hooks are at the end of a file; a status need not read fifty megabytes
_TAIL_BYTES = 16 * 1024


class FileState(str, Enum):
    """What a recorded file is now: `stale` means that another vLLM was installed over it."""

    PRISTINE = "pristine"
    APPLIED = "applied"
    MODIFIED = "modified"
    MISSING = "missing"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class FileStatus:
    """One file: its path (`vllm/…`), owner (`payload` or `hook`) and state."""

    path: str
    owner: str
    state: FileState
    note: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A whole target.

    Attributes:
        state: `not-installed`, `installed`, `unrecorded`, `modified`, `stale`, `interrupted` or `leftover`.
        journal: an install or rollback was interrupted.
        skip: ops left to stock.
        payload_digest: of the payload on disk, None without one.
    """

    state: str
    files: tuple[FileStatus, ...] = ()
    record: Record | None = None
    journal: bool = False
    skip: tuple[str, ...] = ()
    overlay_version: str | None = None
    payload_digest: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Site:
    """What file states are judged by.

    Attributes:
        version: of the vLLM that is there now, None when unknown or gone.
        origin: path → pristine hash or None.
        leftover: `vllm` is no package any more.
    """

    parent: Path
    state_dir: Path
    version: str | None
    origin: Callable[[str], str | None]
    leftover: bool
    target: Target | None = None

    @classmethod
    def of(cls, where: Target | Path) -> Site:
        """The site of a target, or of a folder that contained one."""
        if isinstance(where, Target):
            leftover = not (where.root / "__init__.py").exists()
            return cls(where.parent, where.state_dir, where.version, _lazy_origin(where), leftover, where)
        leftover = not (where / "vllm" / "__init__.py").exists()
        return cls(where, where / ".deepinfer", None, lambda path: None, leftover)

    def moved(self, record: Record | None) -> bool:
        """Whether another version of vLLM is there than the one that was installed into."""
        before = record.target.version if record else None
        return self.leftover or (None not in (before, self.version) and before != self.version)


def _lazy_origin(target: Target) -> Callable[[str], str | None]:
    found: list[Origin] = []

    def lookup(path: str) -> str | None:
        if not found:
            found.append(Origin.of(target))
        return found[0].sha256(path)

    return lookup


def unhooked(content: bytes, wanted: set[str]) -> bytes | None:
    """`content` without our block when the block is one of ours to the byte and the rest has a hash in `wanted`."""
    if not hook.find(content):
        return None
    skip = hook.skipped(content)
    for plain in hook.originals(content):
        if sha256(plain) in wanted and hook.append(plain, skip) == content:
            return plain
    return None


def without_lines(content: bytes, wanted: set[str]) -> bytes | None:
    """As `unhooked`, also for a block that lost some of its lines: nothing but lines of ours may go."""
    if not hook.find(content) or not hook.only_ours(content):
        return None
    return next((plain for plain in hook.originals(content) if sha256(plain) in wanted), None)


def file_state(entry: FileEntry, site: Site, record: Record) -> tuple[FileState, str]:
    """The state of one recorded file, and a note for the user."""
    content = read(site.parent / entry.path)
    if content is None:
        return FileState.MISSING, ""
    now = sha256(content)
    if now == entry.applied_sha256:
        return FileState.APPLIED, ""
    if entry.owner == "payload":
        return FileState.MODIFIED, "edited since it was installed"
    if now == entry.original_sha256:
        return FileState.PRISTINE, "the hook is gone"
    if unhooked(content, {entry.original_sha256 or ""}) is not None:
        return FileState.APPLIED, "the hook was written by another install"
    origin = site.origin(entry.path)
    if now == origin or (origin and unhooked(content, {origin}) is not None):
        return FileState.STALE, "vLLM was reinstalled or upgraded since"
    if not hook.find(content) and site.moved(record):
        return FileState.STALE, "another version of vLLM was installed since"
    return FileState.MODIFIED, "edited since it was installed"


def inspect(target: Target) -> Inspection:
    """The state of `target`, by its record where there is one, else by what lies on disk.

    Raises:
        FailedError: the record cannot be read.
    """
    site = Site.of(target)
    unfinished = Unfinished.of(site)
    record = read_record(site.state_dir)
    found = _recorded(site, record, unfinished) if record else _unrecorded(site, unfinished)
    if unfinished is None:
        return found
    note = f"{unfinished.kind} was interrupted; `deepinfer install` and `deepinfer rollback` recover first"
    files = tuple(unfinished.judge(site, each) for each in found.files)
    return replace(found, state="interrupted", files=files, journal=True, notes=(*found.notes, note))


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What an interrupted install or rollback was about to do.

    Attributes:
        kind: which of the two, for people.
        operations: by path; empty where the journal cannot be read.
    """

    kind: str
    operations: dict[str, Operation]

    @classmethod
    def of(cls, site: Site) -> Unfinished | None:
        """That of a site, None where nothing is unfinished."""
        try:
            journal = journals.pending(site.state_dir)
        except FailedError:
            return cls("an install or rollback", {})
        if journal is None:
            return None
        article = "an" if journal.kind == "install" else "a"
        return cls(f"{article} {journal.kind}", {item.path: item for item in journal.operations})

    def wrote(self, path: str) -> bool:
        """Whether a file is one that it staged or put there."""
        return path in self.operations or journals.is_temp(path)

    def judge(self, site: Site, file: FileStatus) -> FileStatus:
        """A file that is as the transaction found, or made, it was edited by nobody else."""
        item = self.operations.get(file.path)
        if item is None or file.state not in (FileState.MODIFIED, FileState.MISSING):
            return file
        if hash_of(site.parent / file.path) in (item.before_sha256, item.via_sha256, item.after_sha256):
            return replace(file, note=f"{self.kind} got this far")
        return file


def _recorded(site: Site, record: Record, unfinished: Unfinished | None) -> Inspection:
    files = []
    for entry in record.files:
        state, note = file_state(entry, site, record)
        files.append(FileStatus(entry.path, entry.owner, state, note))
    extra = _not_ours(extra_files(site, {entry.path for entry in record.files}), unfinished)
    notes = [f"{path} is not DeepInfer's" for path in extra]
    notes += [
        f"the backup of {entry.path} is missing or damaged: rollback needs it once that file was edited or is gone"
        for entry in record.files
        if entry.backup and hash_of(site.state_dir / entry.backup) != entry.original_sha256
    ]
    notes += [
        f"{entry.path} had edits before the install: rollback gives it back with them"
        for entry in record.files
        if (record.kept or record.adopted) and _was_edited(entry, site, record)
    ]
    if site.version != record.target.version:
        notes.append(f"installed into vLLM {record.target.version}, found {site.version}")
    digest = record.payload_digest
    if any(each.owner == "payload" and each.state is not FileState.APPLIED for each in files):
        digest = _digest(site) or ""
    return Inspection(
        _overall(site, record, files),
        tuple(files),
        record,
        skip=record.skip,
        overlay_version=record.overlay_version,
        payload_digest=digest or None,
        notes=tuple(notes),
    )


def _was_edited(entry: FileEntry, site: Site, record: Record) -> bool:
    """Whether `install --force` accepted a file that is not vLLM's own."""
    if entry.owner == "payload" or site.moved(record):
        return False
    return _cheap_origin(site, entry.path) not in (None, entry.original_sha256)


def _overall(site: Site, record: Record, files: list[FileStatus]) -> str:
    if site.leftover:
        return "leftover"
    states = {each.state for each in files}
    gone = {each.state for each in files if each.owner == "hook"} & {FileState.PRISTINE, FileState.STALE}
    if FileState.MODIFIED in states:
        return "modified"
    if gone or (site.moved(record) and states != {FileState.APPLIED}):
        return "stale"
    return "modified" if FileState.MISSING in states else "installed"


def _not_ours(paths: tuple[str, ...], unfinished: Unfinished | None) -> tuple[str, ...]:
    return paths if unfinished is None else tuple(path for path in paths if not unfinished.wrote(path))


def _unrecorded(site: Site, unfinished: Unfinished | None) -> Inspection:
    hooks = {
        path: (site.parent / path).read_bytes()
        for path, _ in hooked_files(site.parent, tail_bytes=_TAIL_BYTES)
    }
    present = extra_files(site, set())
    if not hooks and not present:
        return Inspection("not-installed")
    bundled = payloads.bundled()
    files: list[FileStatus] = []
    foreign = present
    if has_ours(present, bundled):
        files, foreign = _unrecorded_payload(site, present, bundled)
    elif not hooks:
        foreign = _not_ours(foreign, unfinished)
        return Inspection("not-installed", notes=tuple(f"{path} is not DeepInfer's" for path in foreign))
    state, note = "unrecorded", "no record: it came by `git apply` or `cp -r`, or its state folder was lost"
    if site.leftover:
        state, note = "leftover", "vLLM was uninstalled: `deepinfer rollback` removes what is left"
    elif not hooks:
        note = "the overlay's package is there, but no file of vLLM is hooked"
    elif not files:
        state = "modified"
        note = "vLLM's files are hooked, but the overlay's package is missing: they cannot be imported"
    files += [_unrecorded_hook(site, path, content) for path, content in hooks.items()]
    if state == "unrecorded" and any(each.state is not FileState.APPLIED for each in files):
        state = "modified"
    found = payloads.load(site.parent / PAYLOAD_DIR)
    # how it came there is known, then
    notes = (note,) if unfinished is None else ()
    return Inspection(
        state,
        tuple(files),
        skip=tuple(sorted({name for content in hooks.values() for name in hook.skipped(content)})),
        overlay_version=found.version,
        payload_digest=found.digest if present else None,
        notes=(*notes, *(f"{path} is not DeepInfer's" for path in _not_ours(foreign, unfinished))),
    )


def has_ours(present: tuple[str, ...], bundled: Payload) -> bool:
    """Whether one of the files in the payload's folder has the name of one of ours: else the folder is a user's."""
    return any(path.removeprefix(f"{PAYLOAD_DIR}/") in bundled.files for path in present)


def _unrecorded_payload(
    site: Site, present: tuple[str, ...], bundled: Payload
) -> tuple[list[FileStatus], tuple[str, ...]]:
    """The payload's files compared with the bundled ones, and the files there that are not ours."""
    found = payloads.load(site.parent / PAYLOAD_DIR)
    if found.version not in (None, bundled.version):
        # nothing here knows what another version's files are
        return [FileStatus(path, "payload", FileState.APPLIED, "not checked") for path in present], ()
    files = []
    for name, wanted in bundled.files.items():
        path = f"{PAYLOAD_DIR}/{name}"
        state, note = FileState.APPLIED, ""
        if path not in present:
            state, note = FileState.MISSING, f"overlay {bundled.version} has it"
        elif found.files.get(name) != wanted or (site.parent / path).is_symlink():
            state, note = FileState.MODIFIED, f"not as in overlay {bundled.version}"
        files.append(FileStatus(path, "payload", state, note))
    return files, tuple(path for path in present if path.removeprefix(f"{PAYLOAD_DIR}/") not in bundled.files)


def _unrecorded_hook(site: Site, path: str, content: bytes) -> FileStatus:
    if not content.endswith(hook.block(hook.skipped(content))):
        return FileStatus(path, "hook", FileState.MODIFIED, "our block was edited, or is not at the end")
    origin = _cheap_origin(site, path)
    if origin is not None and unhooked(content, {origin}) is None:
        return FileStatus(path, "hook", FileState.MODIFIED, "besides our block it is not vLLM's own content")
    return FileStatus(path, "hook", FileState.APPLIED)


def _cheap_origin(site: Site, path: str) -> str | None:
    """The pristine hash, None also where asking for it takes git."""
    if site.target is not None and site.target.kind is TargetKind.CHECKOUT:
        return None
    return site.origin(path)


def _digest(site: Site) -> str | None:
    folder = site.parent / PAYLOAD_DIR
    return payloads.load(folder).digest if folder.is_dir() else None


def extra_files(site: Site, known: set[str]) -> tuple[str, ...]:
    """Files in the payload's folder that are not in `known`; bytecode in caches does not count."""
    folder = site.parent / PAYLOAD_DIR
    found = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    names = (
        path.relative_to(site.parent).as_posix()
        for path in found
        if not (path.parent.name == "__pycache__" and (".pyc" in path.name or ".pyo" in path.name))
    )
    return tuple(name for name in names if name not in known)


def hooked_files(parent: Path, *, tail_bytes: int | None = None) -> Iterator[tuple[str, str | None]]:
    """Every source file below `vllm` that has our block: (path, hash).

    Args:
        tail_bytes: look at the end of each file only; the hash is then None.
    """
    own = str(parent / PAYLOAD_DIR)
    for folder, folders, names in os.walk(parent / "vllm"):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and f"{folder}/{name}" != own)
        for name in sorted(names):
            if name.endswith(".py") and hook.find(_end(f"{folder}/{name}", tail_bytes)):
                path = Path(folder, name)
                yield path.relative_to(parent).as_posix(), None if tail_bytes else hash_of(path)


def _end(path: str, tail_bytes: int | None) -> bytes:
    """The end of a file, all of it without `tail_bytes`; nothing where there is no regular file.

    By descriptor: this runs for each of vLLM's 3,000 files whenever `status` finds no record.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return b""
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return b""
        start = max(0, found.st_size - tail_bytes) if tail_bytes else 0
        return os.pread(handle, found.st_size - start, start)
    finally:
        os.close(handle)
