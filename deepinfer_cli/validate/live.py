"""The live check: import the target's vLLM in its own interpreter and see what the overlay has bound.

Run by path with that interpreter (`python live.py`), which may have no DeepInfer: standard library only. The
request is one JSON document on stdin:

    parent    folder that holds the `vllm` to check, put first on sys.path unless the interpreter finds that one
              anyway; null where whatever it finds is meant
    layout    V4.1's folder, such as `deepseek_v41`
    modules   hooked modules to import by name. `amd.rocm` starts CUDA: list it only where that is wanted
    also      other modules to import, so that what they hold is looked at; may be left out
    expect    ops that must be bound; those that replace nothing in vLLM are not looked for
    skipped   ops that the install left to stock
    mode      `bound`, or `stock`: nothing may be bound (run with DEEPINFER_DISABLE=1)

The answer is one JSON line on stdout; all else that vLLM prints goes to stderr. The exit code is 0 also when the
check fails:

    ok            no problem and no error
    vllm_file, payload_file, report    what was imported, and `deepinfer_sm80.report()`; null where not reached
    importers     {module, symbol, same}: each loaded module that holds one of the names, and whether it is the
                  object it must be (ours for a bound op, stock's for any other); outside V4.1 and `vllm.v1`, where
                  other functions have the same names, each that holds ours or what ours replaced
    problems      sentences; what is bound wrongly
    error         null, or {kind, message, stage}: stage `import` (this vLLM cannot be imported here, which says
                  nothing about the overlay), `bind` (the overlay refused, or is missing), `check`
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MESSAGE_LIMIT = 2000
PAYLOAD = "vllm.deepinfer_sm80"


def main() -> None:
    """Read the request, run the check, write the answer."""
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # run by path, this folder comes first on sys.path, and its modules have everyday names
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    answer = check(json.loads(sys.stdin.read()))
    answer_to.write(json.dumps(answer) + "\n")
    answer_to.flush()
    sys.stderr.flush()
    # vLLM may have left threads behind, which would keep the process or print after the answer
    os._exit(0)


def check(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to `request`; never raises for what vLLM or the overlay does."""
    answer: dict[str, Any] = {
        "ok": False,
        "vllm_file": None,
        "payload_file": None,
        "report": None,
        "importers": [],
        "problems": [],
        "error": None,
    }
    stage = "import"
    try:
        _import(request, answer)
        stage = "check"
        _examine(request, answer)
    except (Exception, SystemExit) as error:
        answer["error"] = {
            "kind": type(error).__name__,
            "message": str(error)[:MESSAGE_LIMIT],
            "stage": "bind" if _from_overlay(error) else stage,
        }
    answer["ok"] = not answer["problems"] and answer["error"] is None
    return answer


def _from_overlay(error: BaseException) -> bool:
    """Whether the overlay raised it, or is missing although a hook asks for it."""
    if isinstance(error, ImportError) and (error.name or "").startswith(PAYLOAD):
        return True
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith(PAYLOAD):
            return True
        trace = trace.tb_next
    return False


def _import(request: dict[str, Any], answer: dict[str, Any]) -> None:
    parent = request.get("parent")
    if parent and not _finds(parent):
        # in front only where it must be: site-packages ahead of the standard library can hide parts of that
        sys.path.insert(0, parent)
    vllm = importlib.import_module("vllm")
    answer["vllm_file"] = vllm.__file__
    if parent and not _holds(parent, vllm.__path__):
        raise ImportError(f"another vLLM than the one in {parent} was imported: {list(vllm.__path__)}")
    importlib.import_module(f"vllm.models.{request['layout']}")
    for module in (*request.get("modules", ()), *request.get("also", ())):
        importlib.import_module(module)


def _finds(parent: str) -> bool:
    """Whether the interpreter, left alone, imports the `vllm` in `parent`."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and _holds(parent, spec.submodule_search_locations or ())


def _holds(parent: str, folders: Iterable[str]) -> bool:
    return Path(next(iter(folders), "/")).resolve() == (Path(parent) / "vllm").resolve()


def _examine(request: dict[str, Any], answer: dict[str, Any]) -> None:
    payload = importlib.import_module(PAYLOAD)
    bindings = importlib.import_module(f"{PAYLOAD}.bindings")
    answer["payload_file"] = payload.__file__
    report = answer["report"] = payload.report()
    answer["importers"] = list(_importers(request["layout"], report["bound"], bindings))
    if request.get("mode", "bound") == "stock":
        problems = [f"{one['module']}.{one['symbol']} is bound" for one in report["bound"]]
    else:
        problems = list(_missing(request, report, bindings))
    problems += [
        f"{one['module']} holds another {one['symbol']} than it must"
        for one in answer["importers"]
        if not one["same"]
    ]
    answer["problems"] = problems


def _missing(request: dict[str, Any], report: dict[str, Any], bindings: Any) -> Iterator[str]:
    """What should be bound and is not, and the reverse."""
    if not report["enabled"]:
        yield "the overlay is off here: no SM8x device, or DEEPINFER_DISABLE is set"
        return
    left = set(request.get("skipped", ())) | set(report["disabled_ops"])
    bound = {one["op"] for one in report["bound"]}
    expected = set(request.get("expect", ())) & set(bindings.OPS)
    yield from (f"op {op} is not bound" for op in sorted(expected - bound - left))
    yield from (f"op {op} is bound, though it should be left to stock" for op in sorted(left & bound))
    done = {(one["module"], one["symbol"]) for one in report["bound"]}
    for module in request.get("modules", ()):
        for binding in bindings.find(module):
            if binding.op not in left and (module, binding.symbol) not in done:
                yield f"{module}.{binding.symbol} is not bound"


def _importers(layout: str, bound: list[dict[str, str]], bindings: Any) -> Iterator[dict[str, Any]]:
    """Every loaded module that holds one of the names we replace; of methods, the class that was bound."""
    # methods, and names that a module imports from elsewhere: theirs alone is replaced
    single = {one.symbol for group in bindings.ALL.values() for one in group if _is_single(one)}
    symbols = {one.symbol for group in bindings.ALL.values() for one in group} - single
    held_now = [(one["symbol"], _held(sys.modules[one["module"]], one["symbol"])) for one in bound]
    replaced = {symbol for symbol, _ in held_now}
    # something may have put stock's back after the hook ran
    ours = [(symbol, value) for symbol, value in held_now if bindings.is_ours(value)]
    for one in bound:
        if one["symbol"] in single:
            value = _held(sys.modules[one["module"]], one["symbol"])
            yield {**_named(one["module"], one["symbol"]), "same": bindings.is_ours(value)}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("vllm.") or f"{name}.".startswith(f"{PAYLOAD}."):
            continue
        held = getattr(module, "__dict__", {})
        for symbol in sorted(symbols & held.keys()):
            if symbol in replaced:
                same = any(held[symbol] is value for known, value in ours if known == symbol)
            else:
                same = not bindings.is_ours(held[symbol])
            stock = any(held[symbol] is value.__deepinfer__["stock"] for _, value in ours)
            own = f"{name}.".startswith((f"vllm.models.{layout}.", "vllm.v1."))
            if own or stock or bindings.is_ours(held[symbol]):
                yield {**_named(name, symbol), "same": same}


def _is_single(binding: Any) -> bool:
    return "." in binding.symbol or getattr(binding, "origin", None) is not None


def _held(module: Any, symbol: str) -> Any:
    for part in symbol.split("."):
        module = getattr(module, part)
    return module


def _named(module: str, symbol: str) -> dict[str, Any]:
    return {"module": module, "symbol": symbol}


if __name__ == "__main__":
    main()
