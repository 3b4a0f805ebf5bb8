"""Finding vLLM: by path, by interpreter, or in the running environment; vLLM is never imported."""

from __future__ import annotations

from pathlib import Path

from deepinfer_cli.detect.origin import Origin
from deepinfer_cli.detect.target import LAYOUTS, Target, TargetKind

__all__ = ["LAYOUTS", "Origin", "Target", "TargetKind", "find_leftover", "find_target"]


def find_target(*, target: Path | None = None, python: Path | None = None) -> Target:
    """The vLLM to work on.

    Args:
        target: a folder that contains `vllm`, `vllm` itself, or a checkout's root.
        python: the interpreter whose vLLM is meant; default the running one.

    Raises:
        UnsupportedError: no vLLM there, or one that cannot be patched (inside an archive).
    """
    raise NotImplementedError


def find_leftover(*, target: Path | None = None, python: Path | None = None) -> Path | None:
    """The parent of a `vllm` folder that is not a vLLM but holds our payload or state; None without one."""
    raise NotImplementedError
