"""Gathered rows that outlive their layer, at the end of vLLM's workspace: which of its bytes are nobody else's.

The workspace is one buffer that every part of the model asks for anew, from its start on: experts and indexer between two attentions,
and a CUDA graph writes to what was asked for when it was captured. So it is known of each byte whether anyone but attention has
ever asked for it, and rows are kept only behind the last such byte. Attention asks for no more than it would without.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_here = threading.local()
# bytes from the start that others have asked for, at most, in any workspace of this process
_others = 0
# whether requests are seen at all: only then is it known what is free
_watching = False
# buffer (address, bytes) → what its last rows are
_owners: dict[tuple[int, int], object] = {}


def asked(views: list[Any]) -> None:
    """Someone has asked for the workspace and got `views`; every request comes by here, from the first on."""
    global _others, _watching
    _watching = True
    if not views or getattr(_here, "own", False):
        return
    start = views[0].untyped_storage().data_ptr()
    end = max(view.data_ptr() - start + view.numel() * view.element_size() for view in views)
    _others = max(_others, end)


@contextmanager
def own() -> Iterator[None]:
    """Requests in this context, on this thread, are attention's own."""
    before = getattr(_here, "own", False)
    _here.own = True
    try:
        yield
    finally:
        _here.own = before


def place(rows: Any, count: int) -> int | None:
    """Where `count` of the workspace's `rows` may stay: the first row, or None where others may write to them."""
    first = len(rows) - count
    size = rows.stride(0) * rows.element_size()
    return first if _watching and first * size >= _others else None


def owner(rows: Any) -> object | None:
    """What `claim` was last told about the buffer of `rows`; a buffer that has been replaced has no owner."""
    return _owners.get(_buffer(rows))


def claim(rows: Any, what: object | None) -> None:
    """The last rows of this buffer are now `what`; None: nothing that is kept."""
    buffer = _buffer(rows)
    for known in [known for known in _owners if known[0] == buffer[0] and known != buffer]:
        del _owners[known]
    _owners[buffer] = what


def _buffer(rows: Any) -> tuple[int, int]:
    storage = rows.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
