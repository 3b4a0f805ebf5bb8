"""Where an overlay is, the files of it that are there, and what state each is in. Reads, never writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deepinfer_cli.detect.vllm import Origin, Target
from deepinfer_cli.overlay import hook
from deepinfer_cli.overlay.files import hash_of, read
from deepinfer_cli.overlay.payload import PAYLOAD_DIR, sha256
from deepinfer_cli.overlay.record import FileEntry, Record


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
