"""Reading one vLLM folder: version, layout, metadata, git folder, and whether it is only our leftover."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer_cli.detect.target import LAYOUTS, PACKAGE

_VERSION = re.compile(
    r"^(?:__version__ *= *)?(?:version|__version__)(?: *: *str)? *= *(?:version *= *)?['\"]([^'\"]+)", re.M
)
_OURS = ("deepinfer_sm80",)


def source_version(root: Path) -> str | None:
    """The version that `_version.py` states, without running it."""
    try:
        match = _VERSION.search((root / "_version.py").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def metadata_version(dist_info: Path | None) -> str | None:
    """The version that a distribution's METADATA (or an egg's PKG-INFO) states."""
    for name in ("METADATA", "PKG-INFO"):
        try:
            text = (dist_info / name).read_text(encoding="utf-8", errors="replace") if dist_info else ""
        except OSError:
            continue
        match = re.search(r"^Version: *(\S+)", text, re.M)
        if match:
            return match[1]
    return None


def dist_info(root: Path, version: str | None) -> Path | None:
    """The metadata folder beside the package; with several, the one that states `version`."""
    found = sorted(path for path in root.parent.glob(f"{PACKAGE}-*.dist-info") if path.is_dir())
    same = [path for path in found if metadata_version(path) == version]
    fitting = same or found
    return fitting[-1] if fitting else None


def layout(root: Path) -> str | None:
    """The name of the V4.1 model folder."""
    return next((name for name in LAYOUTS if (root / "models" / name / "__init__.py").is_file()), None)


def git_dir(parent: Path) -> Path | None:
    """The git folder of the work tree whose root is `parent`, no git needed.

    A repository further up is not meant: a venv inside a project is no checkout of vLLM.
    """
    link = parent / ".git"
    if link.is_file():
        try:
            text = link.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        path = (parent / text.partition("gitdir:")[2].strip()).resolve() if "gitdir:" in text else link
        return path if (path / "HEAD").is_file() else None
    return link.resolve() if (link / "HEAD").is_file() else None


def is_leftover(parent: Path) -> bool:
    """Whether `parent` has no vLLM but our payload (in a `vllm` without `__init__.py`) or our state."""
    root = parent / PACKAGE
    if (root / "__init__.py").exists():
        return False
    # a folder that holds a user's files alone is not ours
    payload = any(
        (root / name / "__init__.py").exists()
        or ((root / name).is_dir() and not any((root / name).iterdir()))
        for name in _OURS
    )
    return (
        payload
        or (parent / ".deepinfer" / "record.json").is_file()
        or (parent / ".deepinfer" / "journal.json").is_file()
    )
