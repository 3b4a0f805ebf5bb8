"""Records which Triton kernels a process builds, with what it takes to build them again for another architecture.

Every launch of a new specialization passes `JITFunction._do_compile`, also where the binary comes from the cache on
disk, and so does a warm-up. Runs in the target's interpreter; JSON lines, one for each specialization.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def start(path: Path) -> str | None:
    """Appends to `path` from now on; returns why that is not possible, or None.

    Another process may append to the same file: a line is one write.
    """
    try:
        from triton.runtime.jit import JITFunction

        stock = JITFunction._do_compile
        parameters = inspect.signature(stock)
    except (ImportError, AttributeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    wanted = {"signature", "constexprs", "options", "attrs"}
    if not wanted <= set(parameters.parameters):
        return f"JITFunction._do_compile has other parameters: {', '.join(parameters.parameters)}"

    def compile_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = stock(self, *args, **kwargs)
        try:
            line = json.dumps(describe(self, parameters.bind(self, *args, **kwargs).arguments)) + "\n"
        except Exception as error:  # a launch must not fail for what is only noted
            line = json.dumps({"problem": f"{type(error).__name__}: {error}"[:300]}) + "\n"
        with path.open("a", encoding="utf-8") as stream:
            stream.write(line)
        return kernel

    JITFunction._do_compile = compile_and_record
    return None


def describe(function: Any, given: dict[str, Any]) -> dict[str, Any]:
    """One specialization as JSON.

    Args:
        function: the `JITFunction`.
        given: the arguments of `_do_compile`.

    Returns:
        module, name, signature (argument → type), constexprs and attrs ([path, value] pairs; a path leads to an
        argument), options (num_warps, num_stages, num_ctas), warmup (built ahead, not by a launch).
    """
    options = given["options"]
    return {
        "module": function.fn.__module__,
        "name": function.fn.__qualname__,
        "signature": {str(name): str(kind) for name, kind in given["signature"].items()},
        "constexprs": [[list(path), _plain(value)] for path, value in given["constexprs"].items()],
        "attrs": [[list(path), _plain(value)] for path, value in given["attrs"].items()],
        "options": {
            name: getattr(options, name, None)
            for name in ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_cooperative_grid")
        },
        "warmup": bool(given.get("warmup", False)),
    }


def _plain(value: Any) -> Any:
    """JSON for a constexpr or an attribute; what has none is described and cannot be built again."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return (
            {"tuple": [_plain(item) for item in value]} if isinstance(value, tuple) else [*map(_plain, value)]
        )
    inner = getattr(value, "value", None)
    if type(value).__name__ == "constexpr":
        return _plain(inner)
    if type(value).__module__.startswith("triton.language") and type(value).__name__ == "dtype":
        return {"dtype": value.name}
    function: Callable[..., Any] | None = getattr(value, "fn", None)
    if callable(function):
        return {"function": [function.__module__, function.__qualname__]}
    return {"other": repr(value)[:200]}
