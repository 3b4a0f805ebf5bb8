"""What an install would do to one target: pure, it reads and never writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from deepinfer_cli.detect.target import Target
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.payload import Payload

if TYPE_CHECKING:
    from deepinfer_cli.overlay.record import Record


class Action(str, Enum):
    """What happens to a file."""

    ADD = "add"
    REPLACE = "replace"
    REMOVE = "remove"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file of a plan.

    Attributes:
        path: posix, relative to the parent of the vLLM package (`vllm/…`).
        action: what happens to it; KEEP when its bytes are right already.
        owner: `payload` (ours) or `hook` (vLLM's, with our block at its end).
        before_sha256: hash on disk now, None when it does not exist.
        after_sha256: hash after, None when it is removed.
        content: its bytes after, None when it is removed.
        pristine_sha256: of a hooked file, the hash without our block.
        note: what a user should know about it.
    """

    path: str
    action: Action
    owner: str
    before_sha256: str | None
    after_sha256: str | None
    content: bytes | None
    pristine_sha256: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class OpPlan:
    """One op: whether it is installed, and the symbols (keys) that speak against it."""

    name: str
    group: str
    installed: bool
    differing: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one install does, in order.

    Attributes:
        match: `supported` or `compatible`.
        release: the release whose fingerprints hold.
        skip: ops left to stock (`--partial`).
        adopts: everything is in place already, only the record is missing.
        upgrade_from: the overlay version that is replaced, None when there is none or it is the same.
    """

    target: Target
    overlay_version: str
    payload_digest: str
    match: str
    release: str
    ops: tuple[OpPlan, ...]
    skip: tuple[str, ...]
    changes: tuple[FileChange, ...]
    adopts: bool = False
    upgrade_from: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[FileChange, ...]:
        """The changes that touch the disk."""
        return tuple(change for change in self.changes if change.action is not Action.KEEP)


def plan_install(
    target: Target,
    payload: Payload,
    manifest: Manifest,
    *,
    record: Record | None = None,
    partial: bool = False,
    force: bool = False,
) -> Plan:
    """The plan that makes `target` carry `payload`.

    Raises:
        UnsupportedError: no fingerprints hold, or there is no V4.1 in this vLLM.
        RefusedError: files are not what they must be and `force` is off.
    """
    raise NotImplementedError
