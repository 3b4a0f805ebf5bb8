"""Call the bound functions of an imported vLLM through its own modules; a child of `gpu_live_check.py`.

    python scripts/gpu_live_calls.py ANSWER LAYOUT compare-stock|ignore-stock warm|cold CALLER...

Writes to ANSWER a JSON list with an entry per caller, symbol and case: whether the global is ours, how often our op
was called, and whether the result equals the oracle's and, where stock defines it, stock's. `warm` compiles first
what a serving engine would, and counts what the calls still compile.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# run by path, the folder of this file alone is on sys.path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import gpu_live_cases

HIDDEN = 5120


def main(arguments: Sequence[str]) -> None:
    """Run every call in this process and write the answer."""
    answer, layout, stock, warm, *callers = arguments
    # after each function: if the next one hangs, what is known so far remains
    for results in _calls(layout, callers, stock == "compare-stock", warm == "warm"):
        Path(answer).write_text(json.dumps(results))


def _calls(
    layout: str, callers: list[str], compare_stock: bool, warm: bool
) -> Iterator[list[dict[str, Any]]]:
    """Each case through each caller's own global, in this process: the growing list."""
    importlib.import_module(f"vllm.models.{layout}")
    if gpu_live_cases.device() == "cpu":
        from deepinfer_cli.validate import interpreter

        interpreter.install()
    modules = [importlib.import_module(f"vllm.models.{layout}.{caller}") for caller in callers]
    results = [_warm_up(warm)]
    compiled = _Compiled() if warm else None
    held = set()
    for module in modules:
        for symbol in gpu_live_cases.SYMBOLS:
            if symbol in vars(module):
                held.add(symbol)
                results += _symbol(module, symbol, compare_stock)
                yield results
    absent = sorted(set(gpu_live_cases.SYMBOLS) - held)
    results += [{"symbol": symbol, "ok": False, "error": "no caller holds it"} for symbol in absent]
    if compiled is not None:
        results.append(
            {"case": "compiled after warming up", "kernels": compiled.names, "ok": not compiled.names}
        )
    yield results


def _symbol(module: Any, symbol: str, compare_stock: bool) -> list[dict[str, Any]]:
    import torch

    op, name = gpu_live_cases.SYMBOLS[symbol]
    function, counted, results = getattr(module, symbol), _Counter(op, name), []
    for case, comparable, call in gpu_live_cases.cases(op, module):
        counted.calls.clear()
        try:
            row = call(function, counted, compare_stock and comparable)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            row = {"ok": False, "error": f"{type(error).__name__}: {error}"[:1000]}
        results.append({"holder": module.__name__, "symbol": symbol, "case": case, **row})
    return results


def _warm_up(warm: bool) -> dict[str, Any]:
    """Compiles all that an engine would, or sees to it that the first mHC call does not."""
    module = importlib.import_module("vllm.deepinfer_sm80.warm")
    began = time.perf_counter()
    if warm:
        module.up(HIDDEN)
    else:
        vars(module)["up"] = lambda hidden=None: None
    return {"case": "warm up", "asked": warm, "seconds": round(time.perf_counter() - began, 1), "ok": True}


class _Compiled:
    """The Triton kernels of ours that are compiled from now on."""

    def __init__(self) -> None:
        from triton.runtime.jit import JITFunction

        self.names: list[str] = []
        before = JITFunction._do_compile

        def compiling(function: Any, *args: Any, **kwargs: Any) -> Any:
            if "deepinfer_sm80" in function.__module__:
                self.names.append(function.__name__)
            return before(function, *args, **kwargs)

        JITFunction._do_compile = compiling


class _Counter:
    """Takes the op's place and passes every call on, so that a call that reached it is seen."""

    def __init__(self, op: str, name: str) -> None:
        module = importlib.import_module(f"vllm.deepinfer_sm80.ops.{op}")
        inner = getattr(module, name)
        inner = getattr(inner, "passes_on", inner)
        self.calls: list[dict[str, Any]] = []

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(kwargs)
            return inner(*args, **kwargs)

        vars(counting)["passes_on"] = inner
        setattr(module, name, counting)


if __name__ == "__main__":
    main(sys.argv[1:])
