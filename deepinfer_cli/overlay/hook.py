"""The marked block that hands a vLLM module to the payload: its text, finding it, taking it out."""

from __future__ import annotations

import re

BEGIN = "# >>> deepinfer-sm80 (added by `deepinfer install`; `deepinfer rollback` removes it)"
END = "# <<< deepinfer-sm80"
_BLOCK = re.compile(
    rb"^# >>> deepinfer-sm80[^\n]*\n(?P<body>(?:[^\n]*\n)*?)# <<< deepinfer-sm80[^\n]*\n?", re.MULTILINE
)
_SKIP = re.compile(rb"skip=\((?P<names>[^)]*)\)")


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


def find(source: bytes) -> re.Match[bytes] | None:
    """The block in `source`, or None."""
    return _BLOCK.search(source)


def skipped(source: bytes) -> tuple[str, ...]:
    """The ops that the block in `source` skips; empty without a block."""
    match = find(source)
    names = _SKIP.search(match["body"]) if match else None
    return tuple(re.findall(r'"([^"]+)"', names["names"].decode())) if names else ()


def append(source: bytes, skip: tuple[str, ...] = ()) -> bytes:
    """`source` with the block at its end; an older block is replaced."""
    source = strip(source)
    newline = b"" if not source or source.endswith(b"\n") else b"\n"
    return source + newline + block(skip)


def strip(source: bytes) -> bytes:
    """`source` without any block.

    A file that had no final newline keeps the one `append` gave it: whoever needs the exact original compares
    hashes with and without it (`originals`).
    """
    return _BLOCK.sub(b"", source)


def originals(source: bytes) -> tuple[bytes, ...]:
    """What `source` may have been before `append`: as stripped, and without a final newline."""
    plain = strip(source)
    return (plain, plain.removesuffix(b"\n")) if plain.endswith(b"\n") else (plain,)
