"""Running processes that have a vLLM loaded: they keep the code they started with until they restart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its command line."""

    pid: int
    command: str


def running(root: Path, proc: Path = PROC) -> tuple[Process, ...]:
    """The processes that have a library of the vLLM at `root` mapped.

    Only what this user may read is seen, and only on Linux; elsewhere nothing is found.
    """
    if not (proc / "self" / "maps").exists():
        return ()
    prefix = os.fsencode(root) + b"/"
    return tuple(
        Process(int(folder.name), _command(folder))
        for folder in sorted(proc.iterdir(), key=lambda path: path.name)
        if folder.name.isdigit() and int(folder.name) != os.getpid() and _uses(folder, proc, prefix)
    )


def _uses(folder: Path, proc: Path, prefix: bytes) -> bool:
    try:
        arguments = (folder / "cmdline").read_bytes()
        # reading every process's maps is slow on a busy machine; vLLM names its workers
        if b"vllm" not in arguments.lower() and b"python" not in arguments.lower():
            return False
        if not _same_mounts(folder, proc):
            return False
        return b" " + prefix in (folder / "maps").read_bytes()
    except OSError:
        return False


def _same_mounts(folder: Path, proc: Path) -> bool:
    # in another container the same path is another file
    try:
        return (folder / "ns" / "mnt").readlink() == (proc / "self" / "ns" / "mnt").readlink()
    except OSError:
        return True


def _command(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
