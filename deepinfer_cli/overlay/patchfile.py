"""A plan as files to carry elsewhere: a patch for `git apply`, or a tree for `cp -r`. Nothing here needs git."""

from __future__ import annotations

import difflib
import hashlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_cli.errors import RefusedError
from deepinfer_cli.overlay import hook

if TYPE_CHECKING:
    from deepinfer_cli.overlay.changes import FileChange
    from deepinfer_cli.overlay.plan import Plan

_CONTEXT = 3
_NO_NEWLINE = b"\\ No newline at end of file\n"


def unified_patch(plan: Plan) -> bytes:
    """`plan` as one git-format patch that applies at the parent of `vllm/`, and takes itself back with `-R`.

    It starts from the pristine files, whatever is in the target now, so the same release and payload always give the
    same bytes.
    """
    return b"".join(_file(change) for change in sorted(plan.changes, key=lambda change: change.path))


def exported(plan: Plan) -> tuple[tuple[str, bytes], ...]:
    """Path and content of every file that the overlay adds or changes."""
    return tuple(
        (change.path, change.content)
        for change in plan.changes
        if change.content is not None and change.content != _pristine(change)
    )


def write_tree(plan: Plan, into: Path) -> tuple[Path, ...]:
    """Write the added and changed files below `into` (`into/vllm/…`), for `cp -r`; returns them.

    Raises:
        RefusedError: some of them are there already; nothing is written.
    """
    contents = {into / path: content for path, content in exported(plan)}
    present = tuple(path for path in contents if path.exists())
    if present:
        raise RefusedError(
            "there are files already where the export goes",
            code="into-not-empty",
            hint="name a new folder",
            paths=present,
        )
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tuple(contents)


def git_apply(parent: Path, *arguments: str, checkout: bool) -> str:
    """The command that applies a patch at `parent`."""
    command = shlex.join(["git", "-C", str(parent), "apply", *arguments])
    if checkout:
        return command
    # inside someone else's repository (a venv in a project) git would skip every file and still exit 0
    return f"GIT_CEILING_DIRECTORIES={shlex.quote(str(parent.parent))} {command}"


def _pristine(change: FileChange) -> bytes | None:
    """The file as vLLM publishes it: None for one of ours."""
    if change.owner == "payload" or change.content is None:
        return None
    candidates = hook.originals(change.content) if hook.find(change.content) else (change.content,)
    # a file may have had no final newline
    return next(
        (item for item in candidates if hashlib.sha256(item).hexdigest() == change.pristine_sha256),
        candidates[0],
    )


def _file(change: FileChange) -> bytes:
    old, new = _pristine(change), change.content
    if old == new:
        return b""
    path = change.path.encode()
    if any(byte < 0x20 or byte > 0x7E or byte in b'"\\' for byte in path):
        raise ValueError(f"a path that a patch would have to quote: {change.path}")
    lines = [b"diff --git a/%s b/%s\n" % (path, path)]
    before, after = _blob(old), _blob(new)
    if old is None:
        lines += [b"new file mode 100644\n", b"index %s..%s\n" % (before, after)]
    else:
        lines += [b"index %s..%s 100644\n" % (before, after)]
    hunks = _hunks(old or b"", new or b"")
    if hunks:
        lines += [b"--- /dev/null\n" if old is None else b"--- a/%s\n" % path, b"+++ b/%s\n" % path]
    return b"".join([*lines, *hunks])


def _blob(content: bytes | None) -> bytes:
    """The blob's short id, as git writes it in a patch."""
    if content is None:
        return b"0" * 10
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()[:10].encode()


def _hunks(old: bytes, new: bytes) -> list[bytes]:
    """Unified hunks of `old` → `new`, lines ended by `\\n` alone (a `\\r` is content)."""
    before, after = _lines(old), _lines(new)
    result = []
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(_CONTEXT):
        result.append(
            b"@@ -%s +%s @@\n" % (_range(group[0][1], group[-1][2]), _range(group[0][3], group[-1][4]))
        )
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                result += [_line(b" ", line) for line in before[i1:i2]]
                continue
            result += [_line(b"-", line) for line in before[i1:i2]]
            result += [_line(b"+", line) for line in after[j1:j2]]
    return result


def _lines(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _line(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n" + _NO_NEWLINE


def _range(start: int, stop: int) -> bytes:
    length = stop - start
    if length == 1:
        return b"%d" % (start + 1)
    return b"%d,%d" % (start + 1 if length else start, length)
