"""The compile caches that an install can make stale: where they are, and which entries in them are theirs."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# what each tool writes at its cache's top level; anything else in there is not ours to remove
_TRITON = re.compile(r"[A-Z2-7]{52}|[0-9a-f]{64}")
_TILELANG = re.compile(r"[0-9]+\.[0-9].*|[0-9a-f]{64}|tmp")
_INDUCTOR = re.compile(r"[a-z0-9]{2}|fxgraph|aotautograd|triton|locks|cache|gcc|unhashed_kernel_inputs")
_VLLM = re.compile(r".*")


@dataclass(frozen=True, slots=True)
class Cache:
    """One compile cache.

    Attributes:
        name: the tool it belongs to.
        folder: where it is.
        variable: the environment variable that moves it.
        entries: top-level entries that have the form the tool gives them.
        size: their size in bytes.
        foreign: how many other entries the folder has.
    """

    name: str
    folder: Path
    variable: str
    entries: tuple[Path, ...]
    size: int
    foreign: int = 0


def caches(environ: Mapping[str, str] | None = None) -> tuple[Cache, ...]:
    """The caches of this user, empty ones included."""
    env = os.environ if environ is None else environ
    home = Path(env.get("HOME") or Path.home())
    triton = Path(env.get("TRITON_CACHE_DIR") or Path(env.get("TRITON_HOME") or home, ".triton", "cache"))
    tilelang = Path(env.get("TILELANG_CACHE_DIR") or home / ".tilelang" / "cache")
    inductor = Path(
        env.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
    )
    vllm = Path(env.get("VLLM_CACHE_ROOT") or Path(env.get("XDG_CACHE_HOME") or home / ".cache", "vllm"))
    return (
        _cache("Triton", triton, "TRITON_CACHE_DIR", _TRITON),
        _cache("TileLang", tilelang, "TILELANG_CACHE_DIR", _TILELANG),
        _cache("torch.compile", inductor, "TORCHINDUCTOR_CACHE_DIR", _INDUCTOR),
        _cache("vLLM compile", vllm.expanduser() / "torch_compile_cache", "VLLM_CACHE_ROOT", _VLLM),
    )


def clear(cache: Cache) -> int:
    """Removes the entries of `cache`, nothing else; returns how many are gone.

    Entries that cannot be removed (another user's) stay.
    """
    removed = 0
    for entry in cache.entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        removed += not entry.exists()
    return removed


def _cache(name: str, folder: Path, variable: str, form: re.Pattern[str]) -> Cache:
    try:
        found = sorted(folder.expanduser().iterdir())
    except OSError:
        found = []
    entries = tuple(path for path in found if form.fullmatch(path.name) and not path.is_symlink())
    return Cache(
        name, folder, variable, entries, sum(_size(path) for path in entries), len(found) - len(entries)
    )


def _size(path: Path) -> int:
    if not path.is_dir():
        return _length(path)
    return sum(_length(Path(root, name)) for root, _, names in os.walk(path) for name in names)


def _length(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
