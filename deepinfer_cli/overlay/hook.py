"""The marked block that hands a vLLM module to the payload: its text, finding it, taking it out."""

from __future__ import annotations

import re

BEGIN = "# >>> deepinfer-sm80 (added by `deepinfer install`; `deepinfer rollback` removes it)"
END = "# <<< deepinfer-sm80"
_BLOCK = re.compile(
    rb"^# >>> deepinfer-sm80[^\n]*\n(?:(?!# >>> deepinfer-sm80)[^\n]*\n)*?# <<< deepinfer-sm80[^\n]*\n?",
    re.MULTILINE,
)
# one line of a block, also of one whose markers someone took out
_LINE = re.compile(
    rb"^(?:# (?:>>>|<<<) deepinfer-sm80|from vllm\.deepinfer_sm80 import bind as _deepinfer_bind|_deepinfer_bind\()"
    rb"[^\n]*\n?",
    re.MULTILINE,
)
_SKIP = re.compile(rb"^_deepinfer_bind\([^\n]*skip=\((?P<names>[^)\n]*)\)", re.MULTILINE)


def block(skip: tuple[str, ...] = ()) -> bytes:
    """The block's bytes; `skip` names the ops this install leaves to stock."""
    call = "__name__"
    if skip:
        call += ", skip=(" + ", ".join(f'"{name}"' for name in sorted(skip)) + ",)"
    lines = [
        BEGIN,
        "from vllm.deepinfer_sm80 import bind as _deepinfer_bind",
        f"_deepinfer_bind({call})",
        END,
    ]
    return ("\n".join(lines) + "\n").encode()


def find(source: bytes) -> bool:
    """Whether `source` has our block, or a line of one."""
    return b"deepinfer" in source and _LINE.search(source) is not None


def skipped(source: bytes) -> tuple[str, ...]:
    """The ops that the block in `source` skips; empty without a block."""
    names = _SKIP.search(source)
    return tuple(re.findall(r'"([^"]+)"', names["names"].decode())) if names else ()


def append(source: bytes, skip: tuple[str, ...] = ()) -> bytes:
    """`source` with the block at its end; an older block is replaced."""
    source = strip(source)
    newline = b"" if not source or source.endswith(b"\n") else b"\n"
    return source + newline + block(skip)


def strip(source: bytes) -> bytes:
    """`source` without any block, and without what is left of a damaged one.

    A file that had no final newline keeps the one `append` gave it: whoever needs the exact original compares
    hashes with and without it (`originals`).
    """
    return _LINE.sub(b"", _BLOCK.sub(b"", source))


def only_ours(source: bytes) -> bool:
    """Whether `strip` takes nothing but lines of ours out of `source`, no one's edits inside a block."""
    return _LINE.sub(b"", source) == strip(source)


def originals(source: bytes) -> tuple[bytes, ...]:
    """What `source` may have been before `append`: as stripped, and without a final newline."""
    plain = strip(source)
    return (plain, plain.removesuffix(b"\n")) if plain.endswith(b"\n") else (plain,)
