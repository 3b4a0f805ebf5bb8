"""The state folder: its lock, and what is checked before the first write.

The lock is `flock` on `<state>/lock`, as the filelock package takes it, but by hand: filelock truncates the file it
waits for (the holder's pid would be lost) and may return with a lock on a file that its last holder has deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer_cli.errors import DeepInferError, FailedError, RefusedError, UnsupportedError
from deepinfer_cli.overlay.files import Owner, existing_ancestor, give, make_dirs, remove_dir, write_new
from deepinfer_cli.overlay.signals import deferred

LOCK = "lock"
_POLL_S = 0.05
# room for journal, record and the rounding of small files to blocks
_SLACK_BYTES = 64 * 1024
_BLOCK_BYTES = 4096
# filesystems without files that have no name, and kernels that do not know them
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def lock(state_dir: Path, timeout_s: float = 0) -> Iterator[None]:
    """Hold the target: one install or rollback at a time.

    The state folder is made when it is missing, and lock and folder are removed on leaving when nothing else is in it.

    Raises:
        FailedError: another process holds it (`lock-held`).
        UnsupportedError: the state folder cannot be written (`read-only`).
    """
    deadline = time.monotonic() + timeout_s
    # a signal between making the folder and being ready to remove it would leave it there
    with deferred() as deliver:
        handle = _take(state_dir, deadline)
        try:
            deliver()
            _sign(handle, state_dir / LOCK)
            yield
        finally:
            with deferred():
                if _only_lock(state_dir):
                    # while it is held: whoever opened this file meanwhile sees that it is gone and starts over
                    (state_dir / LOCK).unlink(missing_ok=True)
                    remove_dir(state_dir)
                os.close(handle)


def _sign(handle: int, path: Path) -> None:
    """Whose lock it is, for who waits; the file belongs to vLLM's owner, who must be able to take it after root."""
    try:
        give(handle, Owner.for_new_file(path))
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise write_error(error, path) from error


def _take(state_dir: Path, deadline: float) -> int:
    path = state_dir / LOCK
    while True:
        handle = _open(path)
        if handle is None:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(handle, path):
                return handle
            os.close(handle)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            if time.monotonic() >= deadline:
                raise _held(path, owner) from None
            time.sleep(_POLL_S)
        except BaseException:
            os.close(handle)
            raise


def _open(path: Path) -> int | None:
    """An open lock file; None when its folder vanished between making it and opening the file."""
    try:
        make_dirs(path.parent)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise write_error(error, path.parent) from error


def _is_current(handle: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def _held(path: Path, owner: str) -> FailedError:
    who = f"process {owner}" if owner else "another process"
    return FailedError(
        f"{who} is installing or rolling back in this vLLM",
        code="lock-held",
        hint="wait until it has finished, then run the command again",
        paths=(path,),
    )


def _only_lock(state_dir: Path) -> bool:
    with contextlib.suppress(OSError):
        return [path.name for path in state_dir.iterdir()] == [LOCK]
    return False


def write_error(error: OSError, path: Path) -> DeepInferError:
    """What an `OSError` while writing at `path` means for the user."""
    if error.errno in _READ_ONLY:
        return UnsupportedError(
            f"cannot write in {path}: {error.strerror}",
            code="read-only",
            hint="run as the owner of this vLLM; for a read-only image use `deepinfer export docker --into DIR`",
            paths=(path,),
        )
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return FailedError(
            f"no space to write in {path}: {error.strerror}",
            code="no-space",
            hint="free some space and run the command again",
            paths=(path,),
        )
    return FailedError(
        f"cannot write in {path}: {error.strerror or error}",
        code="write-failed",
        hint="look after the disk, then run the command again",
        paths=(path,),
    )


def preflight(parent: Path, state_dir: Path, sizes: dict[str, int], backup_bytes: Iterable[int]) -> None:
    """Check, before anything is written, that all of it can be.

    Args:
        parent: the folder that contains `vllm`.
        sizes: each file that will be touched (`vllm/…`) → the bytes to be staged beside it.
        backup_bytes: size of each file that goes into `state_dir`.

    Raises:
        RefusedError: a file, or a folder on its way, is a symbolic link (`symlinked-file`).
        UnsupportedError: a folder cannot be written (`read-only`).
        FailedError: not enough space (`no-space`).
    """
    refuse_links(parent, sizes)
    wanted: dict[Path, int] = {existing_ancestor(state_dir): _SLACK_BYTES + _blocks(backup_bytes)}
    for path, size in sizes.items():
        folder = existing_ancestor((parent / path).parent)
        wanted[folder] = wanted.get(folder, 0) + _blocks([size])
    for folder in wanted:
        _probe(folder)
    _check_space(wanted)


def _blocks(sizes: Iterable[int]) -> int:
    return sum((size // _BLOCK_BYTES + 1) * _BLOCK_BYTES for size in sizes)


def refuse_links(parent: Path, paths: Iterable[str]) -> None:
    """Refuse to change what is reached through a symbolic link.

    Raises:
        RefusedError: a file, or a folder on its way, is one (`symlinked-file`).
    """
    seen = {
        parent.joinpath(*Path(path).parts[: end + 1])
        for path in paths
        for end in range(len(Path(path).parts))
    }
    links = sorted(path for path in seen if path.is_symlink())
    if links:
        raise RefusedError(
            "files to be changed are symbolic links; what they point to is not this vLLM's own",
            code="symlinked-file",
            hint="reinstall vLLM without links (uv: `--link-mode copy`), or use `deepinfer install --wheel VERSION --into DIR`",
            paths=tuple(links),
        )


def refuse_unwritable(parent: Path, state_dir: Path, paths: Iterable[str]) -> None:
    """What `preflight` finds by writing, as far as it can be told without.

    Raises:
        UnsupportedError: a folder cannot be written (`read-only`).
    """
    for folder in {
        existing_ancestor(path) for path in (state_dir, *((parent / path).parent for path in paths))
    }:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise write_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder)), folder)


def _probe(folder: Path) -> None:
    """Write a file without a name, which a killed process cannot leave behind; with a name where that is impossible."""
    try:
        try:
            handle = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            _probe_by_name(folder / ".deepinfer-probe")
            return
        try:
            os.write(handle, b"deepinfer\n")
        finally:
            os.close(handle)
    except OSError as error:
        raise write_error(error, folder) from error


def _probe_by_name(path: Path) -> None:
    # one that a killed process left
    path.unlink(missing_ok=True)
    try:
        write_new(path, b"deepinfer\n")
    finally:
        path.unlink(missing_ok=True)


def _check_space(wanted: dict[Path, int]) -> None:
    needed: dict[int, tuple[Path, int]] = {}
    for folder, size in wanted.items():
        device = folder.stat().st_dev
        needed[device] = (folder, needed.get(device, (folder, 0))[1] + size)
    for folder, size in needed.values():
        free = free_bytes(folder)
        if free < size:
            raise FailedError(
                f"{size:,} bytes are needed in {folder}, {free:,} are free",
                code="no-space",
                hint="free some space and run the command again; nothing was written",
                paths=(folder,),
            )


def free_bytes(folder: Path) -> int:
    """What this user may still write on the folder's filesystem."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
