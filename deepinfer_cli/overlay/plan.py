"""What an install would do to one target: pure, it reads and never writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import UnsupportedError
from deepinfer_cli.overlay import match
from deepinfer_cli.overlay.changes import (
    Action,
    FileChange,
    hook_changes,
    payload_changes,
    refuse_missing,
    unrecorded_version,
)
from deepinfer_cli.overlay.manifest import ABSENT, Manifest
from deepinfer_cli.overlay.payload import Payload

if TYPE_CHECKING:
    from deepinfer_cli.overlay.record import Record


__all__ = ["Action", "FileChange", "OpPlan", "Plan", "decide", "plan_install"]


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
        match: `supported`, `compatible`, or `partial` when no release's fingerprints all hold.
        release: the release whose fingerprints hold; with `partial` the nearest one.
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

    @property
    def accepts(self) -> tuple[FileChange, ...]:
        """Edited files that stay as they are (`--force`); the record takes them for originals."""
        return tuple(change for change in self.changes if change.edited and change.action is Action.KEEP)


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

    Args:
        record: what an earlier install left, None without one.
        partial: install the ops that fit when not all do.
        force: go on over files that are not what they must be; a copy of each is kept.

    Raises:
        UnsupportedError: `layout-unknown`, no V4.1 in this vLLM; `vllm-version-unsupported`, no release's
            fingerprints hold (with `partial`: for no op).
        RefusedError: `file-missing`, a hooked file is gone; `file-drift`, vLLM's or our files were edited;
            `not-verifiable`, nothing says what they were; `overlay-conflict`, files that are not ours lie where ours go.
    """
    if target.layout is None:
        raise UnsupportedError(
            f"vLLM {target.version or 'of unknown version'} in {target.root} has no DeepSeek-V4.1 model folder",
            code="layout-unknown",
            hint=f"DeepInfer serves vLLM {', '.join(manifest.releases)}",
        )
    refuse_missing(target, filter(None, map(target.module_path, manifest.looked_at)), record)
    found = match.match(manifest, target.version, match.observe(manifest, match.reader(target)))
    ops = decide(found, target, tuple(manifest.releases), partial=partial)
    skip = tuple(sorted(op.name for op in ops if not op.installed))
    modules = found.hooked(tuple(op.name for op in ops if op.installed))
    hooked = tuple(path for path in map(target.module_path, modules) if path)
    others = tuple(path for path in map(target.module_path, manifest.modules) if path and path not in hooked)
    changes = (
        *payload_changes(target, payload, record, force=force),
        *hook_changes(target, hooked, others, skip, record, force=force),
    )
    writes = [change for change in changes if change.action is not Action.KEEP]
    version = payload.version or "unknown"
    before = record.overlay_version if record else unrecorded_version(target)
    return Plan(
        target=target,
        overlay_version=version,
        payload_digest=payload.digest,
        match=found.kind or "partial",
        release=found.release,
        ops=ops,
        skip=skip,
        changes=changes,
        adopts=record is None and not writes,
        upgrade_from=before if before != version else None,
        notes=_notes(found, ops, target.version),
    )


def decide(
    found: match.Match, target: Target, supported: tuple[str, ...], *, partial: bool
) -> tuple[OpPlan, ...]:
    """Which ops are installed.

    Raises:
        UnsupportedError: not all fit and `partial` is off, or none fits.
    """
    ops = tuple(_op_plan(item, target.layout) for item in found.ops)
    if found.kind or (partial and any(op.installed for op in ops)):
        return ops
    usable = [op.name for op in ops if op.installed]
    claim = f"vLLM {target.version or 'of unknown version'}"
    if target.version == found.release:
        claim += " is listed, but this copy"
    hint = f"DeepInfer serves vLLM {', '.join(supported)} and what is equal to one of them"
    if usable:
        hint = f"--partial installs the ops that fit: {', '.join(usable)}"
        lost = [op.name for op in ops if op.group == "enable" and not op.installed]
        if lost:
            hint += f"; without {', '.join(lost)} the model does not run on this GPU family"
    described = tuple(_describe(found, key, target.layout) for key in found.differing)
    names = ", ".join(text.partition("::")[2] for text in described[:3]) + (", …" if described[3:] else "")
    raise UnsupportedError(
        f"{claim} differs from every supported release; from {found.release} in {_symbols(described)}: {names}",
        code="vllm-version-unsupported",
        hint=hint,
        paths=described,
    )


def _symbols(keys: tuple[str, ...]) -> str:
    return "1 symbol" if len(keys) == 1 else f"{len(keys)} symbols"


def _op_plan(item: match.OpMatch, layout: str | None) -> OpPlan:
    reason = f"equal to vLLM {item.release}" if item.op.replaces else "a step of our own, replaces nothing"
    if item.differing:
        reason = f"not as in vLLM {item.release}: {_symbols(item.differing)}"
    differing = tuple(match.shown(key, layout) for key in item.differing)
    return OpPlan(item.op.name, item.op.group, not differing, differing, reason)


def _describe(found: match.Match, key: str, layout: str | None) -> str:
    word = {ABSENT: "missing", match.UNREADABLE: "unreadable"}.get(found.observed[key], "changed")
    return f"{match.shown(key, layout)} ({word})"


def _notes(found: match.Match, ops: tuple[OpPlan, ...], version: str | None) -> tuple[str, ...]:
    notes = []
    if found.kind == "compatible":
        claim = f"vLLM {version or 'of unknown version'}"
        notes.append(f"{claim} is not a listed release, but every symbol equals {found.release}'s")
        if found.listed:
            notes[-1] = f"this vLLM says it is {version}, but its symbols are those of {found.release}"
    return (*notes, *lost_notes(ops))


def lost_notes(ops: tuple[OpPlan, ...]) -> tuple[str, ...]:
    """What a user must know about each op that is left to stock."""
    notes = []
    for op in ops:
        if not op.installed:
            notes.append(f"op {op.name} is left to stock: {op.reason}")
            if op.group == "enable":
                notes.append(
                    f"WITHOUT {op.name} THE MODEL DOES NOT RUN ON THIS GPU FAMILY: stock vLLM has no substitute"
                )
    return tuple(notes)
