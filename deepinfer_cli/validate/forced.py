"""Whose code runs on a card: its own, or that of an architecture asked for on a newer one."""

from __future__ import annotations

import os
from typing import Any

from deepinfer_cli.detect.gpu import SERVED

ARCHS = tuple(SERVED.values())


def forced_arch(gpu: dict[str, Any], arch: str | None) -> tuple[str | None, str]:
    """The architecture to force on this card (None on an SM8x card), or why the code asked for cannot run here."""
    capability = tuple(gpu["capability"])
    if capability in SERVED:
        own = SERVED[capability]
        other = arch not in (None, own)
        return None, f"{gpu['name']} is {own} and runs its own code, not {arch}'s" if other else ""
    text = ".".join(str(part) for part in capability)
    if capability < (8, 0) or capability == (8, 7):
        return None, f"{gpu['name']} has compute capability {text}, which no overlay kernel serves"
    arch = arch or os.environ.get("DEEPINFER_FORCE_ARCH", "").strip().lower() or None
    if arch is None:
        return None, f"{gpu['name']} has compute capability {text}: stock vLLM is the better path there"
    if arch not in ARCHS:
        return None, f"DEEPINFER_FORCE_ARCH={arch} is unknown; known are {', '.join(ARCHS)}"
    return arch, ""


def other_arch(gpu: dict[str, Any], purpose: str) -> str:
    """What to do about the architecture, where `forced_arch` says that it cannot run."""
    served = tuple(gpu["capability"]) in SERVED
    return "leave --arch out" if served else f"pass --arch sm80 to {purpose} on this card"


def code_name(gpu: dict[str, Any], forced: str | None) -> str:
    """Whose code runs on what, such as `sm80 code on NVIDIA H200`."""
    return f"{forced or SERVED[tuple(gpu['capability'])]} code on {gpu['name']}"
