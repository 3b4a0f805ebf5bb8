"""One row of `deepinfer doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Row:
    """One check: `problem` means that vLLM does not run, or not rightly; `note` is worth knowing."""

    check: str
    status: Status
    value: str
    hint: str = ""
