"""Gathered rows that outlive their layer, at the end of attention's part of vLLM's workspace, for as long as nobody writes there.

The workspace is one buffer that every part of the model asks for anew before it writes: the experts between two attentions, the
indexer before some. A request that reaches the rows ends their life. Only a CUDA graph writes without asking, to what
was asked for when it was captured: rows are kept behind the last of that. Attention asks for no more than it would without.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_here = threading.local()
# bytes from a buffer's start that were asked for while a graph was captured, at most
_captured = 0
# whether requests are seen at all: only then is it known who writes where
_watching = False
# buffer (address, bytes) → what its last rows are, and the byte at which they begin
_owners: dict[tuple[int, int], tuple[object, int]] = {}


def asked(views: list[Any]) -> None:
    """Someone has asked for the workspace and got `views`; every request comes by here, from the first on."""
    global _captured, _watching
    _watching = True
    if not views or getattr(_here, "own", False):
        return
    buffer = _buffer(views[0])
    end = max(view.data_ptr() - buffer[0] + view.numel() * view.element_size() for view in views)
    if _capturing(views[0]):
        _captured = max(_captured, end)
    kept = _owners.get(buffer)
    if kept is not None and kept[1] < end:
        del _owners[buffer]


@contextmanager
def own() -> Iterator[None]:
    """Requests in this context, on this thread, are attention's own: it says by `claim` what it writes."""
    before = getattr(_here, "own", False)
    _here.own = True
    try:
        yield
    finally:
        _here.own = before


def place(rows: Any, count: int) -> int | None:
    """Where `count` of the workspace's `rows` may stay: the first row, or None where a graph may write to them."""
    first = len(rows) - count
    return first if _watching and first * _size(rows) >= _captured else None


def owner(rows: Any) -> object | None:
    """What `claim` was last told about the buffer of `rows`, unless somebody has asked for it since."""
    return _owners.get(_buffer(rows), (None, 0))[0]


def claim(rows: Any, first: int | None, what: object) -> None:
    """From row `first` on lies `what`; None: nothing that is kept."""
    buffer = _buffer(rows)
    # a buffer that has been replaced may have left its address to this one
    for known in [known for known in _owners if known[0] == buffer[0]]:
        del _owners[known]
    if first is not None:
        _owners[buffer] = what, first * _size(rows)


def _size(rows: Any) -> int:
    return rows.stride(0) * rows.element_size()


def _buffer(view: Any) -> tuple[int, int]:
    storage = view.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _capturing(view: Any) -> bool:
    import torch

    return bool(view.is_cuda and torch.cuda.is_current_stream_capturing())
