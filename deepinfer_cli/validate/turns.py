"""Lets one worker at a time use the GPU, so that the others can import and compile without disturbing its timings."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_POLL_S = 0.01
# between two turns of one worker: as long as others need to see that it is over
_PAUSE_S = 0.03
_HEARTBEAT_S = 5.0


class Turns:
    """The GPU's lock: a file in the temporary folder that the workers of all runs on this machine know.

    Attributes:
        held: whether it is this worker's turn.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], path: Path | None = None) -> None:
        self._emit, self._path = emit, path or lock_path()
        self._file: Any = None

    @property
    def held(self) -> bool:
        return self._file is not None

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Within it no other worker uses the GPU; `waiting` is emitted meanwhile, which keeps the case's time from running."""
        self._take()
        try:
            yield
        finally:
            self._give()
            time.sleep(_PAUSE_S)

    @contextmanager
    def others(self) -> Iterator[None]:
        """Within a turn: lets others have theirs, for work that needs no GPU."""
        if not self.held:
            yield
            return
        import torch

        torch.cuda.synchronize()
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        import fcntl

        file = self._path.open("a")
        said = 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - said > _HEARTBEAT_S:
                    said = time.monotonic()
                    self._emit({"event": "waiting"})
            time.sleep(_POLL_S)
        self._file = file
        # the time of what follows begins now
        self._emit({"event": "turn"})

    def _give(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def while_tilelang_compiles(self) -> None:
        """From now on others have their turn while a TileLang function of vLLM is compiled."""
        import tilelang  # noqa: F401

        implementation = sys.modules["tilelang.jit"].JITImpl
        compile_ = implementation.compile

        def compile_outside(this: Any, *args: Any, **kwargs: Any) -> Any:
            with self.others():
                return compile_(this, *args, **kwargs)

        implementation.compile = compile_outside


def lock_path() -> Path:
    """The lock of the GPU that torch uses first; one for each user, whose files others may not open."""
    device = re.sub(r"\W", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]) or "0"
    return Path(tempfile.gettempdir()) / f"deepinfer-gpu-{device}-{os.getuid()}.lock"
