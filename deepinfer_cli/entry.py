"""The console script. Ctrl-C and SIGTERM are handled before anything that takes time is imported."""

from __future__ import annotations

# `signal` brings `enum` and `functools`: milliseconds in which Ctrl-C would still be a traceback
import _signal as signal  # type: ignore[import-not-found]
import os
import sys

VERBS = ("install", "rollback", "status", "verify", "bench", "doctor", "plan", "export")
_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# as `output.document` has it, which cannot be imported in the midst of other imports
_DOCUMENT = """{
  "command": "%s",
  "data": {},
  "errors": [
    {
      "code": "interrupted",
      "hint": null,
      "message": "interrupted",
      "paths": []
    }
  ],
  "exit_code": 130,
  "schema_version": 1,
  "status": "error"
}
"""


def entry() -> None:
    """Runs this process's command line and ends with its exit code; an interruption is 130, whenever it comes."""
    _handle(_quit)
    from deepinfer_cli import app

    code: int | None = None
    try:
        _handle(_interrupt)
        code = app.main()
        # all is done and said: the interpreter's own end is no moment to be interrupted in
        _handle(signal.SIG_IGN)
    except KeyboardInterrupt:
        _handle(signal.SIG_IGN)
        if code is None:
            # a second one, while `main` dealt with the first
            code = _say()
    sys.exit(code)


def verb(arguments: list[str]) -> str:
    """The command that a command line names; `deepinfer` where it names none."""
    return next((text for text in arguments if text in VERBS), "deepinfer")


def _handle(handler: object) -> None:
    for number in _SIGNALS:
        # what the caller ignores (`nohup`) stays ignored
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _quit(_number: int, _frame: object) -> None:
    # nothing has begun; an exception would be lost in an import, or shown with its traceback
    os._exit(_say())


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _say() -> int:
    texts = [(2, "error[interrupted]: interrupted\n")]
    if "--json" in sys.argv[1:]:
        texts.append((1, _DOCUMENT % verb(sys.argv[1:])))
    for descriptor, text in texts:
        try:
            os.write(descriptor, text.encode())
        except OSError:
            # closed, or its reader is gone
            continue
    return _INTERRUPTED
