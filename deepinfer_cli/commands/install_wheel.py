"""`deepinfer install --wheel VERSION --into DIR`: a vLLM release as a tree of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_cli.commands import common
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import RefusedError
from deepinfer_cli.output import Output

if TYPE_CHECKING:
    from deepinfer_cli.commands.install import InstallOptions


def target_of(opts: InstallOptions, out: Output) -> Target:
    """The vLLM to install into; with `--wheel` what an earlier run has put there, or the files as they were fetched.

    Raises:
        RefusedError: `--into` holds something else (`into-not-empty`).
    """
    if opts.wheel is None or opts.into is None:
        return common.locate(opts.where, out)

    from deepinfer_cli.detect.vllm import find_target
    from deepinfer_cli.detect.wheel import cached_tree, check_folder
    from deepinfer_cli.overlay.signals import interruptible

    if is_there(opts.into):
        target = find_target(target=opts.into, python=opts.where.python)
        if not _same_version(target.version, opts.wheel):
            raise RefusedError(
                f"{opts.into} holds vLLM {target.version}, not {opts.wheel}",
                code="into-not-empty",
                hint="name another folder with --into",
            )
    else:
        check_folder(opts.into.resolve())
        with interruptible(), out.progress(None, f"vLLM {opts.wheel}") as progress:
            root = cached_tree(opts.wheel, on_progress=progress.say)
        target = find_target(target=root, python=opts.where.python)
    target = replace(target, reason=f"the files of the vLLM {opts.wheel} wheel")
    common.announce(replace(target, root=opts.into.resolve() / "vllm"), out)
    return target


def is_there(into: Path) -> bool:
    """Whether an earlier run has put its tree there."""
    return (into / "vllm" / "__init__.py").is_file()


def fetch(opts: InstallOptions, out: Output) -> Target:
    """The tree, unpacked where it is to be."""
    from deepinfer_cli.detect.vllm import find_target
    from deepinfer_cli.detect.wheel import fetch_tree
    from deepinfer_cli.overlay.signals import interruptible

    assert opts.wheel is not None
    assert opts.into is not None
    # SIGTERM, too, must not leave half a tree
    with interruptible(), out.progress(None, f"vLLM {opts.wheel}") as progress:
        root = fetch_tree(opts.wheel, opts.into, on_progress=progress.say)
    target = find_target(target=root, python=opts.where.python)
    return replace(target, reason=f"the files of the vLLM {opts.wheel} wheel")


def _same_version(found: str | None, asked: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        # `0.33` is 0.33.0 to pip
        return found is not None and Version(found) == Version(asked)
    except InvalidVersion:
        return found == asked
