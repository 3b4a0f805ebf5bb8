"""Ctrl-C, SIGTERM and SIGHUP while files are being replaced."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; handled as Ctrl-C is."""


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler, not SIG_IGN: child processes must not inherit it."""


def _raise(number: int, _frame: FrameType | None) -> None:
    # one interruption is enough: a second must not cut the restore short
    for each in _SIGNALS:
        signal.signal(each, _ignore)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(signal.Signals(number).name)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first of SIGINT, SIGTERM and SIGHUP into an exception and ignore further ones; then put back.

    Signals that were ignored (`nohup`) stay ignored. Outside the main thread this does nothing.
    """
    with _handlers(_raise):
        yield


@contextmanager
def shielded() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP: what runs inside must not stop half-way."""
    with _handlers(_ignore):
        yield


@contextmanager
def attended(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at every SIGINT, SIGTERM and SIGHUP; what runs inside goes on to its end."""
    with _handlers(lambda _number, _frame: act()):
        yield


@contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Hold SIGINT, SIGTERM and SIGHUP back; they arrive on leaving, or when what is yielded is called.

    By handlers, not by mask: the kernel may hand a signal to a thread that does not mask it.
    """
    came: list[int] = []
    with ExitStack() as held:
        held.enter_context(_handlers(lambda number, _frame: came.append(number)))

        def deliver() -> None:
            held.close()
            if came:
                number = came[0]
                came.clear()
                signal.raise_signal(number)

        try:
            yield deliver
        finally:
            deliver()


@contextmanager
def _handlers(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    active = {each: old for each, old in before.items() if old is not signal.SIG_IGN and old is not None}
    try:
        for each in active:
            signal.signal(each, handler)
        yield
    finally:
        for each, old in active.items():
            signal.signal(each, old)
