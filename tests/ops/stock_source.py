"""Cuts stock's functions out of a release's files, for the `stock_*_child.py` beside it, which run as scripts."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType


def kernels(source: Path, names: Iterable[str]) -> Iterator[str]:
    """The source of functions, or methods (`Class.method`), of the file as jit functions of a module."""
    tree = ast.parse(source.read_text(encoding="utf-8")).body
    for name in names:
        *outer, last = name.split(".")
        body = tree
        if outer:
            body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == outer[0]).body
        function = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == last)
        function.decorator_list = []
        yield "@triton.jit\n" + ast.unparse(function)


def module(name: str, parts: Iterable[str], folder: Path) -> ModuleType:
    """A module of these parts, in a file in `folder`: a jit function needs one."""
    path = folder / f"{name}.py"
    path.write_text("\n\n".join(parts), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
