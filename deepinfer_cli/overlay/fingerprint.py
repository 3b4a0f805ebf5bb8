"""Fingerprints of symbols in a Python source: what a symbol means, not how it is laid out.

Standard library only, and equal under every Python from 3.10: the same source gives the same fingerprint whatever
interpreter DeepInfer runs in.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator

ABSENT = "absent"

_LAYOUT = re.compile(r"deepseek_v4_1(?![0-9])")
_DROPPED = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_MARKERS = {tokenize.NEWLINE: "\0NEWLINE", tokenize.INDENT: "\0INDENT", tokenize.DEDENT: "\0DEDENT"}
# Python 3.12 splits f-strings into several tokens, 3.14 t-strings
_OPENS = {getattr(tokenize, name, -1) for name in ("FSTRING_START", "TSTRING_START")} - {-1}
_CLOSES = {getattr(tokenize, name, -1) for name in ("FSTRING_END", "TSTRING_END")} - {-1}
_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# where a statement, a handler or a case holds statements, in the order of the source
_BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")

_Position = tuple[int, int]
# start, end, text; a marker's text starts with a null, which no source contains
_Token = tuple[_Position, _Position, str]


def fingerprints(source: str, names: Iterable[str]) -> dict[str, str]:
    """The fingerprint of each name that `source` defines, `absent` for the others.

    A name is a function, class or assigned name at the module's top level, or `Class.name`; also below `if`, `try`
    and the like. A name that is defined several times has one fingerprint over all its definitions. An import is no
    definition: whether a module holds another module's function is asked as `from package.module import name`, and the
    fingerprint says no more than that. Decorators count; comments, blank lines and docstrings do not, nor does the indentation's width; the
    two names of the model folder are one.

    Raises:
        SyntaxError: this Python cannot parse `source`.
    """
    source = source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    tree = ast.parse(source)
    lines = source.split("\n")
    parts = _Parts(tree, lines)
    docstrings = _docstrings(tree, lines)
    defined = functools.cache(_index)
    result = {}
    for name in names:
        if name.startswith("from "):
            result[name] = hashlib.sha256(name.encode()).hexdigest() if _imports(tree, name) else ABSENT
            continue
        spans = [_span(node) for node in _definitions(tree, name.split("."), defined)]
        digest = hashlib.sha256()
        for first, last in spans:
            part = parts.tokens(first, last)
            digest.update("\0".join(["\0DEFINITION", *_text(part, docstrings)]).encode())
        result[name] = digest.hexdigest() if spans else ABSENT
    return result


class _Parts:
    """The tokens of a module, made where they are asked for: most of the time of a fingerprint goes into them.

    A part is a statement at the top level with the lines above it that belong to none, or several that share a line.
    """

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        self._lines = lines
        # of each part, its last line
        self._ends: list[int] = []
        for first, last in map(_span, tree.body):
            if self._ends and first <= self._ends[-1]:
                self._ends.pop()
            self._ends.append(last)
        self._made: dict[int, list[_Token]] = {}
        self._whole: list[_Token] = []

    def tokens(self, first: int, last: int) -> list[_Token]:
        """All tokens that begin in these lines of one statement."""
        number = bisect_left(self._ends, first)
        if number not in self._made:
            self._made[number] = self._tokens(number)
        made = self._made[number]
        return made[bisect_left(made, first, key=_line) : bisect_right(made, last, key=_line)]

    def _tokens(self, number: int) -> list[_Token]:
        above = self._ends[number - 1] if number else 0
        try:
            return list(_tokens(self._lines[above : self._ends[number]], above))
        except (SyntaxError, tokenize.TokenError):
            # a backslash at the end of the part
            self._whole = self._whole or list(_tokens(self._lines, 0))
            return self._whole


def _line(token: _Token) -> int:
    return token[0][0]


def _imports(tree: ast.Module, name: str) -> bool:
    """Whether the module has what `from package.module import name` gives, under that name."""
    _, module, _, imported = name.split(" ")
    return any(
        isinstance(node, ast.ImportFrom)
        and (node.module, node.level) == (module, 0)
        and any(alias.name == imported and alias.asname in (None, imported) for alias in node.names)
        for node in _statements(tree)
    )


def _tokens(lines: list[str], above: int) -> Iterator[_Token]:
    """All tokens that mean something, an f-string or t-string as one token with its exact source.

    `lines` begin a logical line at the top level; they have `above` lines above them.
    """
    depth = 0
    opened = (0, 0)
    for kind, string, (top, left), (bottom, right), _ in tokenize.generate_tokens(_reader(lines)):
        if kind in _OPENS:
            opened = opened if depth else (top, left)
            depth += 1
        elif kind in _CLOSES:
            depth -= 1
            if not depth:
                text = _slice(lines, opened, (bottom, right))
                yield (opened[0] + above, opened[1]), (bottom + above, right), text
        elif not depth and kind not in _DROPPED:
            yield (top + above, left), (bottom + above, right), _MARKERS.get(kind, string)


def _reader(lines: list[str]) -> Callable[[], str]:
    left = iter(lines)
    return lambda: next((f"{line}\n" for line in left), "")


def _slice(lines: list[str], start: _Position, end: _Position) -> str:
    (first, left), (last, right) = start, end
    if first == last:
        return lines[first - 1][left:right]
    return "\n".join([lines[first - 1][left:], *lines[first : last - 1], lines[last - 1][:right]])


def _text(tokens: list[_Token], docstrings: dict[_Position, _Position]) -> Iterator[str]:
    """The tokens' texts without docstrings (and what ends them) and without leading indentation."""
    after = "\0NEWLINE"
    started = False
    docstring_end = (0, 0)
    dropped = False
    for start, _, text in tokens:
        if start in docstrings:
            docstring_end = docstrings[start]
        # not by its end: Python 3.12.1 miscounts the columns of a last line that is not ASCII
        if start < docstring_end and not text.startswith("\0"):
            dropped = True
            continue
        ends_docstring = dropped and text in ("\0NEWLINE", ";") and after.startswith("\0")
        dropped = False
        if ends_docstring or (not started and text.startswith("\0")):
            continue
        started = True
        after = text
        yield _LAYOUT.sub("deepseek_v41", text) if "deepseek_v4_1" in text else text


def _docstrings(tree: ast.Module, lines: list[str]) -> dict[_Position, _Position]:
    """Start → end of every docstring, in the columns `tokenize` counts (characters, not bytes)."""
    found = {}
    for node in (tree, *_statements(tree, inside=True)):
        if not isinstance(node, (ast.Module, *_SCOPES)) or not node.body:
            continue
        first = node.body[0]
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            value = first.value
            end = (value.end_lineno or value.lineno, value.end_col_offset or value.col_offset)
            found[_characters(lines, (value.lineno, value.col_offset))] = _characters(lines, end)
    return found


def _characters(lines: list[str], position: _Position) -> _Position:
    line, column = position
    return line, len(lines[line - 1].encode()[:column].decode(errors="ignore"))


def _span(node: ast.stmt) -> tuple[int, int]:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)]), node.end_lineno or node.lineno


def _definitions(
    scope: ast.AST, path: list[str], index: Callable[[ast.AST], dict[str, list[ast.stmt]]]
) -> list[ast.stmt]:
    """The statements that define `path[0]`, or `path[1:]` inside the classes of that name."""
    found = index(scope).get(path[0], [])
    if len(path) == 1:
        return found
    return [
        inner
        for node in found
        if isinstance(node, ast.ClassDef)
        for inner in _definitions(node, path[1:], index)
    ]


def _index(scope: ast.AST) -> dict[str, list[ast.stmt]]:
    """Name → the statements of a scope that define it."""
    found: dict[str, list[ast.stmt]] = {}
    for node in _statements(scope):
        for name in _defined(node):
            found.setdefault(name, []).append(node)
    return found


def _statements(scope: ast.AST, *, inside: bool = False) -> Iterator[ast.stmt]:
    """The statements of one scope in order, those in `if`, `try`, `with` and loops too; `inside` other scopes too."""
    # not recursive: each `elif` is a level
    left = _held(scope)
    while left:
        child = left.pop()
        if isinstance(child, ast.stmt):
            yield child
        if inside or not isinstance(child, _SCOPES):
            left += _held(child)


def _held(node: ast.AST) -> list[ast.AST]:
    """What a node's blocks hold, the last one first."""
    return [child for block in _BLOCKS for child in getattr(node, block, ())][::-1]


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, _SCOPES):
        return {node.name}
    if isinstance(node, ast.Assign):
        names = [item for target in node.targets for item in ast.walk(target) if isinstance(item, ast.Name)]
        return {item.id for item in names if isinstance(item.ctx, ast.Store)}
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()
