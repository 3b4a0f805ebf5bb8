"""What a target is: one vLLM on disk and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PACKAGE = "vllm"
LAYOUTS = ("deepseek_v41", "deepseek_v4_1")


class TargetKind(str, Enum):
    """Where a vLLM lives."""

    ENVIRONMENT = "environment"
    CHECKOUT = "checkout"
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class Target:
    """One vLLM on disk.

    Attributes:
        kind: environment, checkout or tree.
        root: the package's folder (`…/vllm`), links resolved.
        version: from the distribution's METADATA, else `_version.py`; None when neither says.
        layout: name of the V4.1 model folder below `models/`, None when there is none.
        python: the interpreter it belongs to, or the one that was given.
        dist_info: its `.dist-info` folder.
        git_dir: a checkout's git folder for this work tree.
        reason: why this one was taken, for the user.
        others: other vLLM roots that are visible too.
        notes: what else the user should know (editable install, shadowing).
    """

    kind: TargetKind
    root: Path
    version: str | None = None
    layout: str | None = None
    python: Path | None = None
    dist_info: Path | None = None
    git_dir: Path | None = None
    reason: str = ""
    others: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def parent(self) -> Path:
        """The folder that contains `vllm`; every path in plans and records is relative to it."""
        return self.root.parent

    @property
    def state_dir(self) -> Path:
        """Where record, journal, lock and backups live."""
        return self.git_dir / "deepinfer" if self.git_dir else self.parent / ".deepinfer"

    def path(self, path: str) -> Path:
        """A plan's or record's posix path (`vllm/…`) on disk."""
        return self.parent / path

    def module_path(self, module: str) -> str | None:
        """A manifest path (`models/{layout}/…`) as `vllm/models/…`; None when it needs a layout and there is none."""
        if "{layout}" not in module:
            return f"{PACKAGE}/{module}"
        return f"{PACKAGE}/{module.replace('{layout}', self.layout)}" if self.layout else None
