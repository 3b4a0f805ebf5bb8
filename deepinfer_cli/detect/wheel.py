"""vLLM as a tree: its published wheel fetched with pip, and its Python files unpacked."""

from __future__ import annotations

import base64
import csv
import errno
import fcntl
import glob
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepinfer_cli import outfile
from deepinfer_cli.errors import FailedError, RefusedError, UnsupportedError, UsageError

_DOWNLOAD = (
    *("--no-deps", "--only-binary=:all:", "--python-version", "3.12"),
    *("--platform", "manylinux_2_28_x86_64", "--progress-bar", "off", "--disable-pip-version-check"),
)
_VERSION = re.compile(r"[0-9][0-9A-Za-z.!+_-]*")

_STAGING = ".deepinfer-"
_SPACE = "the download is cached below XDG_CACHE_HOME and needs 1 GB for a moment, a tree 60 MB"

Progress = Callable[[str], None]


def fetch_tree(
    version: str, into: Path, *, on_progress: Progress | None = None, reuse_cache: bool = True
) -> Path:
    """Put the Python files of vLLM `version` into the empty or new folder `into`.

    Args:
        on_progress: called with one sentence before each slow step.
        reuse_cache: take an earlier download; the download is about 340 MB.

    Returns:
        `into/vllm`.

    Raises:
        RefusedError: `into` has content.
        UnsupportedError: there is no such vLLM.
        FailedError: no pip, no network, or a damaged download.
    """
    into = into.resolve()
    check_folder(into)
    tree = cached_tree(version, on_progress=on_progress, refresh=not reuse_cache)
    with _writing(into):
        into.parent.mkdir(parents=True, exist_ok=True)
    with _writing(into), _staged(into) as staging:
        _copy(tree.parent, staging)
    return into / "vllm"


def _copy(tree: Path, into: Path) -> None:
    """Stops at the first error; shutil.copytree would go on, and list every file."""
    for folder, names, files in os.walk(tree):
        names[:] = [name for name in names if name != "__pycache__"]
        copy = into / Path(folder).relative_to(tree)
        copy.mkdir(exist_ok=True)
        for name in files:
            shutil.copyfile(Path(folder, name), copy / name)


def check_folder(into: Path) -> None:
    """Refuse a folder that a tree cannot go into.

    Raises:
        RefusedError: it has content, or is a file.
    """
    if not into.exists():
        return
    what = "is not empty"
    if into.is_dir():
        # what a killed run of ours left goes when the next one writes
        if not {path.name for path in into.iterdir()} - {path.name for path in _left(into, into)}:
            return
    else:
        what = "is a file"
    raise RefusedError(
        f"the folder for the tree {what}",
        code="into-not-empty",
        hint="name a new or empty folder with --into",
        paths=(into,),
    )


def cached_tree(version: str, *, on_progress: Progress | None = None, refresh: bool = False) -> Path:
    """The pristine `vllm` folder of `version` in the cache, fetched when it is not there; never write below it.

    Raises: as `fetch_tree`.
    """
    import filelock
    import platformdirs

    if not _VERSION.fullmatch(version):
        raise UsageError(f"not a version: {version!r}", code="version-invalid", hint="an example: 0.33.0")
    folder = Path(platformdirs.user_cache_dir("deepinfer")) / "wheels"
    tree = folder / version
    if (tree / "vllm").is_dir() and not refresh:
        return tree / "vllm"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _writing(folder), filelock.FileLock(folder / f"{version}.lock"):
        if (tree / "vllm").is_dir() and not refresh:
            return tree / "vllm"
        for left in folder.glob(f".download-{glob.escape(version)}-????????"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".download-{version}-") as scratch:
            _tell(on_progress, f"downloading vLLM {version} with pip (about 340 MB)")
            wheel = _download(version, Path(scratch))
            if tree.exists():
                shutil.rmtree(tree)
            _tell(on_progress, f"unpacking the Python files of vLLM {version}")
            unpack(wheel, tree)
    return tree / "vllm"


def unpack(wheel: Path, into: Path) -> None:
    """Unpack the Python files and the dist-info of `wheel`, checked against its RECORD, into the new folder `into`.

    Raises:
        FailedError: the wheel is damaged.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, _staged(into) as staging:
            hashes = _record(archive)
            for name in archive.namelist():
                parts = Path(name).parts
                if name.endswith("/") or not (name.endswith(".py") or parts[0].endswith(".dist-info")):
                    continue
                data = archive.read(name)
                if ".." in parts or name.startswith("/") or hashes.get(name) not in (_hash(data), ""):
                    raise _damaged(wheel, name)
                path = staging / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _damaged(wheel, str(error)) from error


def _record(archive: zipfile.ZipFile) -> dict[str, str]:
    """Name → urlsafe base64 hash, empty for RECORD itself."""
    name = next(item for item in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", item))
    return _rows(archive.read(name).decode())


def _rows(text: str) -> dict[str, str]:
    rows = csv.reader(io.StringIO(text))
    return {row[0]: row[1].removeprefix("sha256=") for row in rows if row}


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _damaged(wheel: Path, what: str) -> FailedError:
    return FailedError(
        f"the downloaded wheel {wheel.name} is damaged: {what} does not match its RECORD",
        code="wheel-damaged",
        hint="run the command again",
    )


@contextmanager
def _staged(into: Path) -> Iterator[Path]:
    """A folder beside `into` that becomes `into` at the end, or vanishes on an error.

    An empty `into` is kept and filled, `vllm` last: someone may stand in it, or it is a mount.
    """
    exists = into.is_dir()
    folder = into if exists else into.parent
    _sweep(folder, into)
    staging = Path(tempfile.mkdtemp(dir=folder, prefix=f".{into.name}{_STAGING}"))
    held = os.open(staging, os.O_RDONLY)
    try:
        # gone with the process, however it ends: then the next run removes the folder
        fcntl.flock(held, fcntl.LOCK_EX)
        yield staging
        if exists:
            for path in sorted(staging.iterdir(), key=lambda path: path.name == "vllm"):
                path.replace(into / path.name)
            staging.rmdir()
            return
        # mkdtemp makes it private
        staging.chmod(0o777 & ~outfile.umask())
        staging.replace(into)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(held)


def _left(folder: Path, into: Path) -> list[Path]:
    """The staging folders for `into` in `folder`."""
    return list(folder.glob(f".{glob.escape(into.name)}{_STAGING}????????"))


def _sweep(folder: Path, into: Path) -> None:
    """Removes the staging folders that killed runs left."""
    for path in _left(folder, into):
        with suppress(OSError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(held)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns what the disk refuses into an error with a way on."""
    try:
        yield
    except OSError as error:
        raise outfile.failed(error, folder, _SPACE) from error


def _tell(on_progress: Progress | None, text: str) -> None:
    if on_progress:
        on_progress(text)


def _download(version: str, into: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FailedError(
            f"pip is missing from {sys.executable}, and it is what fetches the wheel",
            code="pip-missing",
            hint="run `python -m ensurepip`, or unpack the wheel yourself and use --target",
        )
    # a folder with a pip.py in it must not be what runs
    command = [sys.executable, "-m", "pip", "download", *_DOWNLOAD, "--dest", str(into), f"vllm=={version}"]
    done = subprocess.run(command, cwd=into, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    said = done.stderr.lower()
    if "no space left" in said or "disk quota exceeded" in said:
        raise outfile.failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), into.parent, _SPACE)
    # an index that lists no vLLM at all is one that pip did not reach
    reached = "from versions: none" not in said and "retrying" not in said
    if reached and "could not find a version" in said:
        raise UnsupportedError(
            f"pip finds no wheel of vLLM {version} for manylinux_2_28_x86_64",
            code="vllm-version-unsupported",
            hint="`pip index versions vllm` lists what there is",
        )
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    detail = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {done.returncode}"
    raise FailedError(
        f"pip could not download vLLM {version}: {detail}",
        code="download-failed",
        hint="check the network and pip's index settings, then run the command again",
    )


def changed_files(tree: Path) -> tuple[str, ...]:
    """The files of an unpacked tree (the parent of `vllm`) that its RECORD does not list as they are."""
    hashes = _rows(next(tree.glob("vllm-*.dist-info/RECORD")).read_text(encoding="utf-8"))
    names = [path.relative_to(tree).as_posix() for path in tree.rglob("*.py")]
    return tuple(sorted(name for name in names if hashes.get(name) != _hash((tree / name).read_bytes())))
