"""Which code of the payload an op's kernels are made of, so that a measurement says what it measured.

The payload grows; a result of `bench` stays true as long as the kernels behind it do. An op's code is `__init__.py`,
`triton.py` and `tilelang.py` of its folder, and what they import from the payload, wherever in a file they do: whole
modules where a module is imported, and of `from module import name` the statements that define the name, and what
those use. Statements that define nothing always count; comments between statements and a module's docstring do not.
The payload's own `__init__.py`, which loads everything, counts only where a name of it is asked for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from deepinfer_cli.overlay.payload import Payload, sha256

_ROOTS = ("__init__.py", "triton.py", "tilelang.py")
_INIT = "__init__.py"


def op_digest(payload: Payload, op: str) -> str:
    """sha256 over the code of an op's kernels; equal as long as nothing changed that could alter them."""
    parts = op_code(payload, op)
    return sha256("".join(f"{path} {sha256(parts[path].encode())}\n" for path in sorted(parts)).encode())


def op_code(payload: Payload, op: str) -> dict[str, str]:
    """Path below the payload → what of that file the op's kernels are made of."""
    closure = _Closure(payload)
    for name in _ROOTS:
        closure.add_module(f"ops/{op}/{name}")
    return {path: module.text() for path, module in closure.modules.items()}


class _Module:
    """One file: its statements, and which of them were asked for."""

    def __init__(self, source: str) -> None:
        self._lines = source.splitlines(keepends=True)
        self.body = [node for node in ast.parse(source).body if not _is_text(node)]
        self.definitions: dict[str, list[ast.stmt]] = {}
        for node in self.body:
            for name in _defined(node):
                self.definitions.setdefault(name, []).append(node)
        self.taken: set[ast.stmt] = set()

    def always(self) -> list[ast.stmt]:
        """What runs at import and defines nothing."""
        return [node for node in self.body if not list(_defined(node))]

    def text(self) -> str:
        """The source of what was taken, in order."""
        return "".join(
            "".join(self._lines[_first(node) : node.end_lineno]) for node in self.body if node in self.taken
        )


class _Closure:
    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self.modules: dict[str, _Module] = {}

    def add_module(self, path: str) -> None:
        """All of a file, where there is one."""
        if path in self._payload.files:
            self._take(path, self._module(path).body)

    def _add_name(self, path: str, name: str) -> None:
        module = self._module(path)
        # a name that is found nowhere may come from anything
        self._take(path, module.definitions.get(name, module.body))

    def _module(self, path: str) -> _Module:
        if path not in self.modules:
            self.modules[path] = _Module(self._payload.read(path).decode())
            self._take(path, self.modules[path].always())
            for folder in PurePosixPath(path).parents:
                init = (folder / _INIT).as_posix()
                # the packages above it are run too
                if folder.name and init in self._payload.files:
                    self._module(init)
        return self.modules[path]

    def _take(self, path: str, statements: Iterable[ast.stmt]) -> None:
        module = self.modules[path]
        for statement in statements:
            if statement in module.taken:
                continue
            module.taken.add(statement)
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id in module.definitions:
                    self._add_name(path, node.id)
                elif isinstance(node, ast.ImportFrom) and node.level:
                    self._follow(path, node)

    def _follow(self, path: str, node: ast.ImportFrom) -> None:
        folder = PurePosixPath(path).parents[node.level - 1]
        base = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
        for name in (alias.name for alias in node.names):
            inner = self._file(base / name)
            if inner is not None:
                self.add_module(inner)
                continue
            outer = self._file(base)
            if outer is not None:
                self._module(outer)
                self._add_name(outer, name)

    def _file(self, module: PurePosixPath) -> str | None:
        """The file of a module, which may be a package."""
        candidates = ((module / _INIT).as_posix(), f"{module.as_posix()}.py")
        return next((path for path in candidates if path in self._payload.files), None)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)]) - 1


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a module's statement binds; none of those within an `if`, a `try` or a loop."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (item.id for item in ast.walk(target) if isinstance(item, ast.Name))
