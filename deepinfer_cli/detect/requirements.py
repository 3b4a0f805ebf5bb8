"""What vLLM's own metadata asks for: torch, triton and tilelang pins, and the CUDA it is built for."""

from __future__ import annotations

import re
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_NAMES = ("torch", "triton", "tilelang")
_CUDA = re.compile(r"\bcu(\d\d)\b")


def pins(dist_info: Path | None) -> dict[str, SpecifierSet]:
    """Name → version range for torch, triton and tilelang; empty without metadata."""
    from packaging.requirements import InvalidRequirement, Requirement

    found: dict[str, SpecifierSet] = {}
    for line in _requires(dist_info):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name.lower() in _NAMES and applies:
            found[requirement.name.lower()] = requirement.specifier
    return found


def cuda_major(dist_info: Path | None) -> int | None:
    """The CUDA major version that the wheel's own requirements name (`…[cu13]`); None when they name none."""
    majors = {int(match[1]) for line in _requires(dist_info) for match in [_CUDA.search(line)] if match}
    return max(majors, default=None)


def _requires(dist_info: Path | None) -> list[str]:
    if dist_info is None:
        return []
    try:
        text = (dist_info / "METADATA").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [str(value) for value in HeaderParser().parsestr(text).get_all("Requires-Dist") or []]
