"""`deepinfer status`: what is installed where, in one screen; reads only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_cli.commands import common, status_match
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.arch import resolve_archs
from deepinfer_cli.detect.gpu import GpuReport, detect_gpus
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import DeepInferError, ExitCode
from deepinfer_cli.output import Output
from deepinfer_cli.overlay.inspect import Inspection
from deepinfer_cli.render import joined, plural, table
from deepinfer_cli.result import ErrorItem, Result

_HEALTHY = {"installed", "not-installed", "unrecorded"}
_MEANING = {
    "modified": "files of the overlay or of vLLM were edited, or are missing",
    "stale": "vLLM was reinstalled or upgraded since the install",
    "interrupted": "an install or rollback was interrupted",
    "leftover": "vLLM is gone, files of ours are left",
}
_NEXT = {
    "not-installed": "deepinfer install",
    "installed": "deepinfer verify",
    "unrecorded": "deepinfer install",
    "modified": "deepinfer rollback",
    "stale": "deepinfer install",
    "interrupted": "deepinfer rollback",
    "leftover": "deepinfer rollback",
}
# where files were edited: (state, whether there is a record); the plain command refuses there
_NEXT_EDITED = {
    ("not-installed", False): "deepinfer install --force",
    ("modified", True): "deepinfer rollback --force",
    ("modified", False): "deepinfer install --force",
}


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """What `status` was asked to show."""

    where: TargetOptions = field(default_factory=TargetOptions)


def run(opts: StatusOptions, out: Output) -> Result:
    """Shows the state; exit code 1 when it is not one to run with."""
    from deepinfer_cli.detect.vllm import find_target
    from deepinfer_cli.overlay.inspect import inspect

    target = find_target(target=opts.where.target, python=opts.where.python)
    found = inspect(target)
    gpus = detect_gpus()
    match, drift = status_match.match_of(target, found)
    if drift:
        note = "`deepinfer install` refuses edited files; with --force it keeps a copy of each and goes on"
        found = replace(found, files=drift, notes=(*found.notes, note))
    step = _NEXT[found.state]
    if found.record is None and found.state == "unrecorded":
        note, step = _adoption(found)
        found = replace(found, notes=(*found.notes, note))
    elif any(one.state.value == "modified" for one in found.files):
        step = _NEXT_EDITED.get((found.state, found.record is not None), step)
        if found.skip and step.startswith("deepinfer install"):
            step += " --partial"
    if found.journal and (problem := _unreadable_journal(target)):
        # what recovers by itself refuses this
        step, found = "", replace(found, notes=(*found.notes, problem))
    if match["match"] == "unsupported" and step.startswith("deepinfer install"):
        alone = "deepinfer rollback" if found.record else ""
        step = f"{step} --partial" if match.get("usable") else alone
    if step:
        verifies = step.startswith("deepinfer verify")
        step += (common.with_own_python(opts.where, target) if verifies else opts.where).arguments
    if found.record and step.startswith("deepinfer install") and not any(gpu.served for gpu in gpus.gpus):
        step += f" --arch {found.record.arch[0]}"
    out.table(table(("Item", "Value"), _rows(target, found, gpus, match)))
    odd = [one for one in found.files if one.state.value not in {"applied", "pristine"}]
    if odd or (out.verbose and found.files):
        shown = found.files if out.verbose else tuple(odd)
        out.table(table(("State", "Path", "Note"), ((one.state.value, one.path, one.note) for one in shown)))
    if step:
        out.note(f"next: {step}")
    data = _data(target, found, gpus, match)
    if found.state in _HEALTHY:
        return Result("status", data)
    error = ErrorItem(
        f"overlay-{found.state}",
        _MEANING[found.state],
        step or None,
        tuple(one.path for one in odd),
    )
    return Result("status", data, ExitCode.FAILED, (error,))


def _unreadable_journal(target: Target) -> str:
    from deepinfer_cli.overlay.journal import pending

    try:
        pending(target.state_dir)
    except DeepInferError as error:
        return f"{error.message}; {error.hint}"
    return ""


def _adoption(found: Inspection) -> tuple[str, str]:
    """What `install` does with an overlay that has no record, and the command for it."""
    from deepinfer_cli.overlay import payload

    bundled = payload.bundled()
    command = "deepinfer install --partial" if found.skip else "deepinfer install"
    if found.overlay_version == bundled.version:
        return f"`{command}` adopts it", command
    command += " --force"
    return (
        f"its files are not those of this DeepInfer's overlay {bundled.version}: `{command}` "
        "replaces it and keeps a copy of each that differs"
    ), command


def _rows(
    target: Target, found: Inspection, gpus: GpuReport, match: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    yield "vLLM", f"{target.version or 'unknown version'}, {target.kind.value}"
    yield "root", str(target.root)
    yield "chosen", target.reason
    for other in target.others:
        yield "another vLLM", f"{other} (not touched)"
    yield from _gpu_rows(gpus)
    yield "overlay", _overlay_text(found)
    if match["release"]:
        yield "match", common.match_text(match["match"], match["release"], target.version)
    elif match["match"]:
        yield "match", f"unsupported: {match['reason']}"
    if found.record is not None:
        yield "ops", joined(found.record.ops) or "none"
        yield "for", joined(found.record.arch)
    if found.skip:
        yield "left to stock", joined(found.skip)
        from deepinfer_cli.overlay import manifest

        lost = tuple(sorted(manifest.load().enable & set(found.skip)))
        if lost:
            yield "does not run", f"without {joined(lost)} the model does not run on this GPU family"
    if found.files:
        yield "files", _counts(found)
    yield "journal", "unfinished transaction" if found.journal else "none"
    for text in (*target.notes, *found.notes):
        yield "note", text


def _gpu_rows(gpus: GpuReport) -> Iterator[tuple[str, str]]:
    for gpu in gpus.gpus:
        yield f"GPU {gpu.index}", common.gpu_text(gpu)
    if not gpus.gpus:
        try:
            resolve_archs(gpus)
        except DeepInferError as error:
            yield "GPU", error.message
    if gpus.driver:
        yield "driver", f"{gpus.driver} ({gpus.source})"
    if gpus.visible is not None:
        yield "CUDA_VISIBLE_DEVICES", gpus.visible or "empty"


def _overlay_text(found: Inspection) -> str:
    version = f"{found.overlay_version} " if found.overlay_version else ""
    when = f", {found.record.created_at}" if found.record else ""
    return f"{version}{found.state}{when}"


def _counts(found: Inspection) -> str:
    counts: dict[str, int] = {}
    for one in found.files:
        counts[one.state.value] = counts.get(one.state.value, 0) + 1
    return joined(f"{plural(count, 'file')} {state}" for state, count in counts.items())


def _data(target: Target, found: Inspection, gpus: GpuReport, match: dict[str, Any]) -> dict[str, Any]:
    record = found.record
    return {
        "target": common.target_data(target),
        "gpu": common.gpu_data(gpus),
        "state": found.state,
        "match": match,
        "overlay_version": found.overlay_version,
        "payload_digest": found.payload_digest,
        "installed_at": record and record.created_at,
        "archs": list(record.arch) if record else [],
        "ops": list(record.ops) if record else [],
        "skip": list(found.skip),
        "journal": found.journal,
        "files": [
            {"path": one.path, "owner": one.owner, "state": one.state, "note": one.note}
            for one in found.files
        ],
        "notes": list(found.notes),
    }
