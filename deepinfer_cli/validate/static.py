"""The static level: what is on disk in the target, without running any of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deepinfer_cli.detect.target import Target
from deepinfer_cli.overlay import hook, manifest, match, payload
from deepinfer_cli.overlay.inspect import Inspection, inspect
from deepinfer_cli.overlay.payload import PAYLOAD_DIR
from deepinfer_cli.overlay.record import Record
from deepinfer_cli.overlay.site import FileState
from deepinfer_cli.validate.model import CaseResult, Level, Status

OP = "overlay"
_SHOWN = 6


def check_target(target: Target) -> Iterator[CaseResult]:
    """Every static check of `target`; a skipped op is a result of its own."""
    found = inspect(target)
    yield _result("installed", lambda: _installed(found))
    if found.state in ("not-installed", "leftover"):
        return
    yield _result("transaction", lambda: _transaction(found))
    yield _result("files", lambda: _files(found))
    yield _result("fingerprints", lambda: _fingerprints(target, found.skip))
    yield _result("hooks", lambda: _hooks(target, found))
    yield _result("payload", lambda: _payload(target, found.record))
    yield _result("compiles", lambda: _compiles(target))
    for op in found.skip:
        reason = "left to stock by the install (--partial)"
        if op in manifest.load().enable:
            reason += "; without it the model does not run on this GPU family"
        yield CaseResult(f"{OP}[op {op}]", OP, Level.STATIC, Status.SKIPPED, reason)


def _result(name: str, check: Callable[[], tuple[str, dict[str, str]]]) -> CaseResult:
    began = time.perf_counter()
    reason, extra = check()
    status = Status.FAILED if reason else Status.PASSED
    return CaseResult(
        f"{OP}[{name}]",
        OP,
        Level.STATIC,
        status,
        reason,
        duration_s=time.perf_counter() - began,
        extra=dict(extra),
    )


def _installed(found: Inspection) -> tuple[str, dict[str, str]]:
    if found.state == "not-installed":
        return "the overlay is not installed in this vLLM: run `deepinfer install`", {}
    if found.state == "leftover":
        return "vLLM was uninstalled and only the overlay is left: run `deepinfer rollback`", {}
    if found.state == "stale":
        return "vLLM was reinstalled or upgraded since: run `deepinfer install` again", {}
    return "", {"state": found.state}


def _transaction(found: Inspection) -> tuple[str, dict[str, str]]:
    if found.journal:
        return (
            "an interrupted install or rollback is unfinished: run `deepinfer install` or `deepinfer rollback`",
            {},
        )
    return "", {}


def _files(found: Inspection) -> tuple[str, dict[str, str]]:
    wrong = [item for item in found.files if item.state is not FileState.APPLIED]
    if wrong:
        return _listed([f"{item.path} is {item.state.value}" for item in wrong]), {}
    return ("", {"files": str(len(found.files))}) if found.files else ("no file of the overlay was found", {})


def _fingerprints(target: Target, skip: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    known = manifest.load()
    found = match.match(known, target.version, match.observe(known, match.reader(target)))
    differing = [key for item in found.ops if item.op.name not in skip for key in item.differing]
    if differing:
        return _listed(
            [f"{match.shown(key, target.layout)} is not as in vLLM {found.release}" for key in differing]
        ), {}
    return "", {"match": found.kind or "partial", "release": found.release}


def _hooks(target: Target, found: Inspection) -> tuple[str, dict[str, str]]:
    known = manifest.load()
    fit = match.match(known, target.version, match.observe(known, match.reader(target)))
    wanted = fit.hooked(tuple(op.name for op in known.ops if op.name not in found.skip))
    faults = []
    for module in wanted:
        path = target.module_path(module)
        content = target.path(path).read_bytes() if path and target.path(path).is_file() else b""
        if not hook.find(content):
            faults.append(f"{path or module} has no hook block")
        elif hook.skipped(content) != tuple(sorted(found.skip)):
            faults.append(f"{path} skips {', '.join(hook.skipped(content)) or 'nothing'}")
        elif hook.strip(content) + hook.block(found.skip) != content:
            faults.append(f"{path}: the hook block was edited or is not at the end")
    return (_listed(faults), {}) if faults else ("", {"hooks": str(len(wanted))})


def _payload(target: Target, record: Record | None) -> tuple[str, dict[str, str]]:
    root = target.root / payload.PACKAGE
    if not (root / "__init__.py").is_file():
        return f"{root} is missing", {}
    found = payload.load(root)
    if record is not None:
        # files that are not ours are no part of it
        ours = {entry.path.removeprefix(f"{PAYLOAD_DIR}/") for entry in record.files}
        found = payload.Payload(root, {name: value for name, value in found.files.items() if name in ours})
    digest = found.digest
    if record is not None and digest != record.payload_digest:
        return f"its digest is {digest[:12]}, the record has {record.payload_digest[:12]}", {}
    same = digest == payload.bundled().digest
    note = "as bundled with this DeepInfer" if same else "another than the one bundled with this DeepInfer"
    return "", {"digest": digest, "payload": note}


def _compiles(target: Target) -> tuple[str, dict[str, str]]:
    faults = []
    files = touched_files(target)
    for path in files:
        try:
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError, OSError) as error:
            faults.append(f"{path.relative_to(target.parent)}: {error}")
    return (_listed(faults), {}) if faults else ("", {"files": str(len(files))})


def touched_files(target: Target) -> tuple[Path, ...]:
    """The payload's Python files, and the modules that hold a hook block or may hold one."""
    known = manifest.load()
    paths = [target.module_path(module) for module in known.modules]
    hooked = [target.path(path) for path in paths if path and target.path(path).is_file()]
    return (*sorted((target.root / payload.PACKAGE).rglob("*.py")), *hooked)


def hooked_modules(target: Target) -> tuple[str, ...]:
    """The import names of the modules that hold a hook block, such as `vllm.models.deepseek_v41.amd.rocm`."""
    files = [path for path in touched_files(target) if target.root / payload.PACKAGE not in path.parents]
    return tuple(
        ".".join(path.relative_to(target.parent).with_suffix("").parts)
        for path in files
        if hook.find(path.read_bytes())
    )


def _listed(faults: list[str]) -> str:
    more = len(faults) - _SHOWN
    return "; ".join(faults[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
