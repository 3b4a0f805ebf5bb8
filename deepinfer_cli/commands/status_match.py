"""Which release a vLLM is like, as `deepinfer status` says it, and the files that an install would refuse."""

from __future__ import annotations

from typing import Any

from deepinfer_cli.detect.target import Target, TargetKind
from deepinfer_cli.errors import RefusedError
from deepinfer_cli.overlay.inspect import Inspection
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.record import Record
from deepinfer_cli.overlay.site import FileState, FileStatus
from deepinfer_cli.render import plural


def match_of(target: Target, found: Inspection) -> tuple[dict[str, Any], tuple[FileStatus, ...]]:
    """Which release this vLLM is like, and the files an install would refuse.

    From the record while it is about the vLLM that is there, else by looking at the symbols.
    """
    record = found.record
    if record is not None and found.state != "stale" and record.target.version == target.version:
        return {"match": record.match, "release": record.release, "reason": ""}, ()
    if record is None and found.state != "not-installed":
        return {"match": None, "release": None, "reason": ""}, ()
    from deepinfer_cli.overlay import manifest, payload

    bundled = payload.bundled()
    known = manifest.load(bundled.root / "manifest.toml")
    if is_published(target, known):
        return {"match": "supported", "release": target.version, "reason": ""}, ()
    from deepinfer_cli.overlay import match as matching

    if target.layout is None:
        reason = "it has no DeepSeek-V4.1 model folder"
        return {"match": "unsupported", "release": None, "reason": reason}, ()
    if gone := _missing(target, known, record):
        return {"match": "unsupported", "release": None, "reason": gone}, ()
    seen = matching.match(known, target.version, matching.observe(known, matching.reader(target)))
    drift = _drift(target, seen.hooked(tuple(op.name for op in known.ops))) if record is None else ()
    if seen.kind is None:
        usable = [each.op.name for each in seen.ops if not each.differing]
        keys = [matching.shown(key, target.layout) for key in seen.differing]
        verb = "differs" if len(keys) == 1 else "differ"
        reason = f"{plural(len(keys), 'symbol')} {verb} from vLLM {seen.release}: {', '.join(keys[:3])}"
        reason += ", …" if keys[3:] else ""
        return {
            "match": "unsupported",
            "release": None,
            "reason": reason,
            "differing": keys,
            "usable": usable,
        }, drift
    return {"match": seen.kind, "release": seen.release, "reason": ""}, drift


def _missing(target: Target, known: Manifest, record: Record | None) -> str | None:
    """What an install says of modules that vLLM came with and that are gone; a checkout's are left to git."""
    if target.kind is TargetKind.CHECKOUT:
        return None
    from deepinfer_cli.overlay.changes import refuse_missing

    try:
        refuse_missing(target, filter(None, map(target.module_path, known.looked_at)), record)
    except RefusedError as error:
        return f"{error.message}: {', '.join(map(str, error.paths))}; {error.hint}"
    return None


def _drift(target: Target, modules: tuple[str, ...]) -> tuple[FileStatus, ...]:
    """The files that an install would hook and that are not vLLM's own; a checkout's are left to git."""
    from deepinfer_cli.detect.origin import Origin
    from deepinfer_cli.overlay.files import hash_of

    if target.kind is TargetKind.CHECKOUT:
        return ()
    origin = Origin.of(target)
    found = []
    for path in filter(None, map(target.module_path, modules)):
        wanted = origin.sha256(path)
        if wanted != hash_of(target.path(path)):
            what = f"not as in vLLM {target.version}" if wanted else "nothing says what vLLM's own was"
            found.append(FileStatus(path, "hook", FileState.MODIFIED, what))
    return tuple(found)


def is_published(target: Target, known: Manifest) -> bool:
    """Whether hashes alone prove what fingerprints would, ten times faster.

    They do when RECORD lists the published bytes of the hooked files (so it is that release's RECORD), and every
    module with a symbol that matters is as RECORD says.
    """
    from deepinfer_cli.detect.origin import Origin
    from deepinfer_cli.overlay.files import hash_of

    release = known.releases.get(target.version or "")
    if release is None or target.kind is TargetKind.CHECKOUT:
        return False
    origin = Origin.of(target)
    if origin.source != "RECORD":
        return False
    for module in known.looked_at:
        path = target.module_path(module)
        recorded = origin.sha256(path) if path else None
        if path is None or hash_of(target.path(path)) != recorded:
            return False
        if module in release.files and recorded != release.files[module]:
            return False
    return True
