"""Files that a user names for a command to write: looked at before the work, and written whole or not at all.

Every `-o FILE` goes through here: folders that are missing are made, what was there stays until all is written, and a
wrong command line writes nothing. `document` is for commands whose file is the JSON document: it is also written where
the command failed or could not run.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_cli.errors import DeepInferError, ExitCode, FailedError, UsageError
from deepinfer_cli.result import ErrorItem, Result

if TYPE_CHECKING:
    from deepinfer_cli.output import Output

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# /dev/stdout may lead to a file that is open already
_DEVICES = ("/dev/", "/proc/")


def check(path: Path) -> None:
    """Refuse, before anything is done, what could not be written at the end.

    Raises:
        UsageError: it is a folder.
        FailedError: its folder cannot be written (`write-failed`).
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder", code="usage", hint="name a file")
    if _is_special(path):
        return
    folder = next(above for above in path.absolute().parents if above.exists())
    if not folder.is_dir():
        raise failed(NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)), folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise failed(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), folder)


def write(path: Path, data: bytes) -> None:
    """Write `data` to `path`; what was there stays until all of it is written.

    Raises:
        FailedError: it cannot be written (`write-failed`, `no-space`).
    """
    try:
        if _is_special(path):
            path.write_bytes(data)
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).chmod(path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~umask())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise failed(error, path) from error


def document(path: Path | None, verb: str, command: Callable[[], Result], out: Output) -> Result:
    """Runs `command` and writes to `path` what `--json` prints, also of an error that is no wrong usage.

    Args:
        path: the file, looked at first; None writes nothing.
        verb: the command's name.

    Raises:
        DeepInferError: what `command` raises, or what `check` and `write` do.
    """
    if path is None:
        return command()
    check(path)
    try:
        result = command()
    except DeepInferError as error:
        if error.exit_code not in (ExitCode.USAGE, ExitCode.INTERRUPTED):
            item = ErrorItem(error.code, error.message, error.hint, error.paths)
            _write_document(path, Result(verb, exit_code=error.exit_code, errors=(item,)), out)
        raise
    _write_document(path, result, out)
    return result


def _write_document(path: Path, result: Result, out: Output) -> None:
    from deepinfer_cli.output import document as text_of

    write(path, text_of(result.completed(out.complete)).encode())
    out.note(f"written to {path}")


def failed(error: OSError, path: Path, hint: str | None = None) -> FailedError:
    """What an `OSError` while writing at `path` means for the user."""
    if error.errno in _FULL:
        text = f"no space to write: {error.strerror}"
        return FailedError(text, code="no-space", hint=hint or "free some space", paths=(path,))
    text = f"cannot write: {error.strerror or error}"
    return FailedError(
        text, code="write-failed", hint=hint or "name a place that this user may write", paths=(path,)
    )


def umask() -> int:
    """This process's; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _is_special(path: Path) -> bool:
    return str(path).startswith(_DEVICES) or (path.exists() and not path.is_file())
