"""Finding vLLM: by path, by interpreter, or in the running environment; vLLM is never imported."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

from deepinfer_cli.detect import inside
from deepinfer_cli.detect.origin import Origin
from deepinfer_cli.detect.probe import Probe, probe
from deepinfer_cli.detect.target import LAYOUTS, PACKAGE, Target, TargetKind
from deepinfer_cli.errors import UnsupportedError

__all__ = ["LAYOUTS", "Origin", "Target", "TargetKind", "find_leftover", "find_target"]

_SITE = {"site-packages", "dist-packages"}


def find_target(*, target: Path | None = None, python: Path | None = None) -> Target:
    """The vLLM to work on.

    Args:
        target: a folder that contains `vllm`, `vllm` itself, or a checkout's root.
        python: the interpreter whose vLLM is meant, default the running one; with `target`, the one that runs it.

    Raises:
        UnsupportedError: no vLLM there, or one that cannot be patched (inside an archive).
    """
    if target is not None:
        root, reason = _locate(target)
        if python is not None:
            python = probe(python).python
        return _describe(root, reason, python=python)
    answer = probe(python)
    root = _importable(answer)
    which = "--python" if python else "the running Python"
    return _describe(
        root,
        f"what {which} ({answer.python}) imports",
        python=answer.python,
        infos=answer.infos,
        others=_others(root, answer),
        notes=_notes(root, answer),
    )


def find_leftover(*, target: Path | None = None, python: Path | None = None) -> Path | None:
    """The parent of a `vllm` folder that is no vLLM any more but holds our payload or state; None without one."""
    if target is not None:
        target = target.resolve()
        candidates = [target, *([target.parent] if target.name == PACKAGE else [])]
    else:
        answer = probe(python)
        candidates = [*(folder.parent for folder in answer.folders), *answer.seen, *answer.states]
    return next((path.resolve() for path in candidates if inside.is_leftover(path)), None)


def _locate(target: Path) -> tuple[Path, str]:
    """The vLLM package that `--target` means, and why."""
    path = target.resolve()
    if (path / PACKAGE / "__init__.py").is_file():
        what = "checkout" if inside.git_dir(path) else "folder"
        return (path / PACKAGE).resolve(), f"the {what} given with --target contains it"
    if path.name == PACKAGE and (path / "__init__.py").is_file():
        return path, "given with --target"
    for parent in (path, path.parent):
        if inside.is_leftover(parent) and (parent == path or path.name == PACKAGE):
            raise _leftover(parent)
    raise _not_found(path)


def _not_found(path: Path) -> UnsupportedError:
    hint = "--target takes the folder that contains vllm (such as site-packages), vllm itself, or a checkout's root"
    if path.suffix in {".whl", ".zip", ".egg"} and path.is_file():
        hint = "unpack the archive first, or use `deepinfer install --wheel VERSION --into DIR`"
    elif (path / "pyvenv.cfg").is_file():
        hint = f"this is a virtual environment: use --python {quote(str(path / 'bin' / 'python'))}"
    what = f"there is no vLLM in {path}" if path.exists() else f"{path} does not exist"
    return UnsupportedError(what, code="vllm-not-found", hint=hint)


def _leftover(parent: Path) -> UnsupportedError:
    return UnsupportedError(
        f"the folder {parent / PACKAGE} is no vLLM, only what DeepInfer left there: vLLM was uninstalled",
        code="vllm-not-found",
        hint=f"deepinfer rollback --target {quote(str(parent))}",
    )


def _importable(answer: Probe) -> Path:
    """The package folder that the interpreter would import."""
    if answer.origin is None:
        leftover = next((path for path in (*answer.seen, *answer.states) if inside.is_leftover(path)), None)
        if leftover:
            raise _leftover(leftover.resolve())
        raise UnsupportedError(
            f"{answer.python} (Python {answer.version}) has no vLLM",
            code="vllm-not-found",
            hint="pass --python the interpreter that runs vLLM or --target its folder; without a vLLM, "
            "`deepinfer install --wheel 0.33.0 --into DIR` fetches one",
        )
    root = answer.origin.parent
    if not answer.origin.is_file() or answer.origin.name != "__init__.py":
        raise UnsupportedError(
            f"the vLLM of {answer.python} is not a folder of Python files: {answer.origin}",
            code="vllm-in-archive",
            hint="install vLLM unpacked (pip does), then run the command again",
        )
    return root.resolve()


def _others(root: Path, answer: Probe) -> tuple[Path, ...]:
    found = [
        (entry / PACKAGE).resolve() for entry in answer.seen if (entry / PACKAGE / "__init__.py").is_file()
    ]
    return tuple(path for path in dict.fromkeys(found) if path != root)


def _notes(root: Path, answer: Probe) -> tuple[str, ...]:
    notes = []
    for info in answer.infos:
        if source := _editable(info):
            notes.append(f"vLLM is an editable install of {source}")
    if any(Path(item).resolve() == root.parent for item in answer.pythonpath):
        notes.append(f"it comes from PYTHONPATH ({root.parent}), which goes before the installed packages")
    notes += [
        f"{entry} holds what DeepInfer left of an uninstalled vLLM: `deepinfer rollback --target {quote(str(entry))}`"
        for entry in dict.fromkeys((*answer.seen, *answer.states))
        if inside.is_leftover(entry)
    ]
    return tuple(notes)


def _editable(info: Path) -> str | None:
    """The folder an editable install points to, from its direct_url.json."""
    try:
        data = json.loads((info / "direct_url.json").read_text(encoding="utf-8"))
        return str(data["url"]).removeprefix("file://") if data["dir_info"].get("editable") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _describe(
    root: Path,
    reason: str,
    *,
    python: Path | None,
    infos: tuple[Path, ...] = (),
    others: tuple[Path, ...] = (),
    notes: tuple[str, ...] = (),
) -> Target:
    git_dir = inside.git_dir(root.parent)
    source_version = inside.source_version(root)
    dist_info = inside.dist_info(root, source_version)
    if dist_info is None:
        # an editable install's metadata is elsewhere; another copy's says nothing about this one
        dist_info = next((info for info in infos if _points_to(info, root)), None)
    kind = TargetKind.TREE
    if git_dir:
        kind = TargetKind.CHECKOUT
    elif root.parent.name in _SITE:
        kind = TargetKind.ENVIRONMENT
    return Target(
        kind=kind,
        root=root,
        version=inside.metadata_version(dist_info) or source_version,
        layout=inside.layout(root),
        python=python,
        dist_info=dist_info,
        git_dir=git_dir,
        reason=reason,
        others=others,
        notes=notes,
    )


def _points_to(info: Path, root: Path) -> bool:
    source = _editable(info)
    return source is not None and Path(source).resolve() in (root.parent, *root.parent.parents)
