"""What the tests over all ops need to know of each: its languages, oracle, wrong implementations."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer_cli.overlay import payload
from deepinfer_cli.validate.ops import languages_of, ops_of

ROOT = payload.bundled().root
OPS = ops_of(ROOT)
LANGUAGES = {op: languages_of(ROOT, op) for op in OPS}
INTERPRETED = tuple(op for op in OPS if "triton" in LANGUAGES[op])
ARCHS = ("sm80", "sm86", "sm89")


def oracle(op: str) -> Callable[..., Any]:
    """The op's reference, with the op's keyword contract."""
    reference = importlib.import_module(f"deepinfer_sm80.ops.{op}.reference")
    function: Callable[..., Any] = getattr(reference, op, None) or getattr(reference, f"build_{op}")
    return function


def wrong_kernels() -> dict[str, dict[str, Callable[..., Any]]]:
    """Op → name → wrong implementation, from every `wrong*.py` beside this file.

    A file has a table WRONG: op → name → function, or name → function beside a constant OP.
    """
    found: dict[str, dict[str, Callable[..., Any]]] = {}
    for path in sorted(Path(__file__).parent.glob("wrong*.py")):
        module = importlib.import_module(f"tests.ops.{path.stem}")
        op = getattr(module, "OP", None)
        for name, functions in ({op: module.WRONG} if op else module.WRONG).items():
            found.setdefault(name, {}).update(functions)
    return found
