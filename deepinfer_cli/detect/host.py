"""The host beside its GPUs: memory that a process may have, and room on the disk of a folder that may not be there yet."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
# cgroup v1 writes a huge number for no limit
_UNLIMITED = 1 << 60


def memory_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes of memory: the machine's, or this container's limit where that is less; None where nothing says it."""
    try:
        found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(), re.M)
    except OSError:
        return None
    if found is None:
        return None
    total = int(found[1]) * 1024
    for name in _LIMITS:
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < min(total, _UNLIMITED):
            total = int(text)
    return total


def existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    folder = folder.expanduser().absolute()
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path(folder.anchor))


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk where `folder` is or will be."""
    return shutil.disk_usage(existing(folder)).free


def writable(folder: Path) -> bool:
    """Whether this user may make entries there."""
    return os.access(existing(folder), os.W_OK | os.X_OK)
