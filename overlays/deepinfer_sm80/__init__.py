"""DeepInfer's overlay for compute capability 8.x.

`bind` is what the marked block at the end of a vLLM module calls; `report` says what this process has bound.
Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import bindings, gate, journal
from .bindings import BindError
from .gate import SwitchError

__version__ = "0.1.0"
__all__ = ["BindError", "SwitchError", "bind", "bound_ops", "report", "serves"]

# named as imported: inside vLLM that is a child of vLLM's logger, so the line reaches the server's log
_log = logging.getLogger(__name__)
# (module, symbol) → op, and the ops that a hook's skip left to stock
_bound: dict[tuple[str, str], str] = {}
_skipped: set[str] = set()
# the ops in the last line that was logged at INFO; None before the first
_announced: set[str] | None = None


def bind(name: str, skip: tuple[str, ...] = ()) -> None:
    """Replace the listed functions of the vLLM module `name` by our ops, on an SM8x device; else do nothing.

    Args:
        name: the module's `__name__`, as its hook passes it; the module's body has run to the hook.
        skip: ops that the install left to stock; their symbols are not looked at.

    Raises:
        BindError: this vLLM is not one that the overlay fits, or an install or rollback was not finished.
        SwitchError: a `DEEPINFER_*` variable makes no sense.
    """
    if gate.disabled():
        _log.debug("%s: stock, %s is on", name, gate.DISABLE)
        return
    off = gate.disabled_ops(bindings.OPS)
    device = gate.device()
    if device is None:
        _log.debug("%s: stock, the device is not SM8x", name)
        return
    root = name.partition(".")[0]
    _refuse_unfinished(root)
    try:
        _check_skip(skip)
        bound = bindings.attach(name, gate.enabled_ops(bindings.OPS, skip))
    except BindError as error:
        raise BindError(_explained(str(error), root)) from None
    _bound.update({(name, binding.symbol): binding.op for binding in bound})
    _skipped.update(skip)
    _announce(name, device, {binding.op for binding in bound}, off)


def report() -> dict[str, Any]:
    """What this process has bound, ready for JSON.

    Returns:
        version, arch (None where the device is not SM8x), forced, enabled (this process would bind),
        disabled_ops, bound (op, module and symbol of each), skipped (ops left to stock by the install),
        payload_root, payload_digest, journal_present.

    Raises:
        SwitchError: a `DEEPINFER_*` variable makes no sense.
    """
    disabled = gate.disabled()
    device = None if disabled else gate.device()
    root = Path(__file__).parent
    return {
        "version": __version__,
        "arch": device.arch if device else None,
        "forced": bool(device and device.forced),
        "enabled": device is not None,
        "disabled_ops": list(bindings.OPS if disabled else gate.disabled_ops(bindings.OPS)),
        "bound": [{"op": op, "module": module, "symbol": symbol} for (module, symbol), op in _bound.items()],
        "skipped": sorted(_skipped),
        "payload_root": str(root),
        "payload_digest": _digest(root),
        "journal_present": _unfinished("vllm") is not None,
    }


def bound_ops() -> set[str]:
    """The ops that this process has bound so far."""
    return set(_bound.values())


def serves(op: str) -> bool:
    """Whether `op` is neither switched off nor left out of this install: for an op that is a part of another's code.

    Raises:
        SwitchError: a `DEEPINFER_*` variable makes no sense.
    """
    return not gate.disabled() and op in gate.enabled_ops(bindings.OPS, _skipped)


def _announce(name: str, device: gate.Device, ops: set[str], off: Iterable[str]) -> None:
    """One line per process at INFO, also if nothing is bound; a bind that adds no op is of interest to nobody but us."""
    global _announced
    level = logging.DEBUG if _announced is not None and ops <= _announced else logging.INFO
    _announced = ops | (_announced or set())
    parts = [f"DeepInfer {__version__}: {device.arch}{' (forced)' if device.forced else ''}"]
    parts.append(f"bound {', '.join(sorted(_announced)) or 'nothing'}")
    if _skipped:
        parts.append(f"not installed: {', '.join(sorted(_skipped))}")
    if off:
        parts.append(f"switched off: {', '.join(off)}")
    _log.log(level, "%s (%s)", "; ".join(parts), name)


def _check_skip(skip: Iterable[str]) -> None:
    unknown = sorted(set(skip) - set(bindings.OPS))
    if unknown:
        raise BindError(f"the hook skips ops that this overlay does not have: {', '.join(unknown)}")


def _refuse_unfinished(package: str) -> None:
    found = _unfinished(package)
    if found is not None:
        raise BindError(
            f"deepinfer_sm80: an install or rollback of the overlay was interrupted ({found}); "
            "run `deepinfer status`, then `deepinfer install` or `deepinfer rollback` to finish it"
        )


def _unfinished(package: str) -> Path | None:
    """The journal beside the imported `package`, by its folder: the files in it may be links to a cache."""
    folders = list(getattr(sys.modules.get(package), "__path__", ()))
    return journal.find(Path(folders[0])) if folders else None


def _explained(problem: str, package: str) -> str:
    return (
        f"deepinfer_sm80 {__version__} does not fit this vLLM ({_vllm_version(package)}): {problem}; "
        f"run `deepinfer status`. {gate.DISABLE_OPS}=<op> leaves one op to stock, {gate.DISABLE}=1 all of them"
    )


def _vllm_version(package: str) -> str:
    version = getattr(sys.modules.get(package), "__version__", None)
    if version:
        return str(version)
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "version unknown"


def _digest(root: Path) -> str:
    """The digest that the installer records for a payload: over path and hash of every file, in order."""
    hashes = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".pyc", ".pyo"}
    }
    lines = "".join(f"{path} {hashes[path]}\n" for path in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()
