"""Small file operations that never open a target for writing."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deepinfer_cli.overlay.payload import sha256

NEW_FILE_MODE = 0o644
NEW_DIR_MODE = 0o755
BYTECODE = (".pyc", ".pyo")


@dataclass(frozen=True, slots=True)
class Owner:
    """Permission bits and owner of a file."""

    mode: int
    uid: int
    gid: int

    @classmethod
    def of(cls, path: Path) -> Owner:
        """Those of `path`, links not followed."""
        found = path.lstat()
        return cls(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)

    @classmethod
    def for_new_file(cls, path: Path) -> Owner:
        """Those of a file that does not exist yet: 0644, and root gives it to the folder's owner."""
        return cls(NEW_FILE_MODE, *_owner_beside(path))


def _owner_beside(path: Path) -> tuple[int, int]:
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    found = existing_ancestor(path.parent).stat()
    return found.st_uid, found.st_gid


def existing_ancestor(path: Path) -> Path:
    """`path` or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def read(path: Path) -> bytes | None:
    """The content of `path`, None when it does not exist."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def hash_of(path: Path) -> str | None:
    """Hex sha256 of `path`, None when it does not exist."""
    content = read(path)
    return None if content is None else sha256(content)


def sync_dir(path: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_new(path: Path, content: bytes, owner: Owner | None = None) -> None:
    """Create `path`, which must not exist, and flush it; mode and owner are set before its content is complete."""
    owner = owner or Owner.for_new_file(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        give(handle, owner)
        os.fchmod(handle, owner.mode)
        view = memoryview(content)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def give(handle: int, owner: Owner) -> None:
    """Make an open file belong to `owner`."""
    if (owner.uid, owner.gid) != (os.geteuid(), os.getegid()):
        os.fchown(handle, owner.uid, owner.gid)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` in one step: temp file in the same folder, fsync, rename, fsync of the folder."""
    temp = path.with_name(path.name + ".tmp")
    temp.unlink(missing_ok=True)
    try:
        write_new(temp, content)
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    sync_dir(path.parent)


def make_dirs(path: Path) -> None:
    """Create `path` and what is missing above it, 0755 whatever the umask; root gives them to the owner above."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    uid, gid = _owner_beside(path)
    path.mkdir(exist_ok=True)
    path.chmod(NEW_DIR_MODE)
    if (uid, gid) != (os.geteuid(), os.getegid()):
        os.chown(path, uid, gid)


def remove_dir(path: Path) -> bool:
    """Remove `path` if it is an empty folder; False when it stays."""
    try:
        path.rmdir()
    except OSError:
        return not path.exists()
    return True


def purge_bytecode(source: Path) -> None:
    """Delete the cached bytecode of one source file: with equal size and mtime the old code would run."""
    cache = source.parent / "__pycache__"
    for path in cache.glob(f"{_escape(source.stem)}.*"):
        # `.pyc.<number>` is what an interrupted import leaves
        if any(end in path.name for end in BYTECODE):
            path.unlink(missing_ok=True)


def _escape(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def remove_empty_package(folder: Path) -> None:
    """Remove bytecode caches below `folder`, then every folder that holds nothing; other files stay."""
    if folder.is_symlink():
        return
    for current, _, names in os.walk(folder, topdown=False):
        here = Path(current)
        if here.name == "__pycache__":
            for name in names:
                if any(end in name for end in BYTECODE):
                    (here / name).unlink(missing_ok=True)
        remove_dir(here)


def remove_tree(folder: Path, keep: Iterable[Path] = ()) -> None:
    """Remove every file below `folder` but those in `keep`, then the folders that are empty."""
    kept = set(keep)
    for current, _, names in os.walk(folder, topdown=False):
        here = Path(current)
        for name in names:
            if here / name not in kept:
                (here / name).unlink(missing_ok=True)
        remove_dir(here)


def unlink_quietly(path: Path) -> None:
    """Delete `path` if it is there; its folder may be gone too."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
