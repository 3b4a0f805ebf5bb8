"""Finding the journal that an unfinished install or rollback leaves beside vLLM."""

from __future__ import annotations

from pathlib import Path


def find(vllm_root: Path) -> Path | None:
    """The journal for the vLLM in `vllm_root`, or None; a file that may not be read counts as absent."""
    for folder in _state_dirs(vllm_root.resolve().parent):
        journal = folder / "journal.json"
        try:
            if journal.exists():
                return journal
        except OSError:
            continue
    return None


def _state_dirs(parent: Path) -> tuple[Path, ...]:
    """Where state of a vLLM in `parent` may lie: beside it, and in the git folder of a checkout."""
    beside = parent / ".deepinfer"
    git = parent / ".git"
    if git.is_dir():
        return (beside, git / "deepinfer")
    try:
        text = git.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return (beside,)
    # a worktree or submodule: the file says `gitdir: <path>`, relative to itself or absolute
    key, _, folder = text.partition(":")
    return (beside, parent / folder.strip() / "deepinfer") if key == "gitdir" else (beside,)
