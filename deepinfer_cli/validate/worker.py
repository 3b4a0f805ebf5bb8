"""Runs one op's cases in the target's own interpreter, where DeepInfer may not be installed.

Started by path. One JSON request on stdin, one JSON line per event on stdout, everything else on stderr. Only the
standard library is imported before the request says what is needed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "deepinfer_sm80"
_HERE = Path(__file__).resolve().parent

Emit = Callable[[dict[str, Any]], None]
Task = Callable[[dict[str, Any], Emit], None]


def main() -> int:
    """Reads the request, does it, reports; a crash is for the parent to notice."""
    emit = _event_channel()
    sys.dont_write_bytecode = True  # a check leaves nothing in the target
    _borrow_package()
    request = json.loads(sys.stdin.read())
    TASKS[request["task"]](request, emit)
    emit({"event": "done"})
    return 0


def _event_channel() -> Emit:
    """A private copy of stdout for events; whoever prints to stdout from now on prints to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        channel.write(json.dumps(event, default=str) + "\n")
        channel.flush()

    return emit


def _borrow_package() -> None:
    """Makes `deepinfer_cli.validate` importable from beside this file, and nothing else of its environment."""
    if "deepinfer_cli" not in sys.modules:
        package = types.ModuleType("deepinfer_cli")
        package.__path__ = [str(_HERE.parent)]
        sys.modules["deepinfer_cli"] = package
    # python puts the script's folder first, where `static` or `model` could shadow a user's module
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]


def load_payload(root: Path) -> Any:
    """The payload at `root` as the package `deepinfer_sm80`, whatever else goes by that name.

    Raises:
        ImportError: `root` is no package.
    """
    spec = importlib.util.spec_from_file_location(
        PACKAGE, root / "__init__.py", submodule_search_locations=[str(root)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package at {root}")
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(PACKAGE + ".")]:
        del sys.modules[name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    return module


def say_hello(request: dict[str, Any], emit: Emit) -> None:
    """Loads the payload and reports which file and which bytes it is."""
    from deepinfer_cli.overlay.payload import load

    module = load_payload(Path(request["payload"]))
    digest = load(Path(module.__file__ or "").parent).digest
    emit({"event": "hello", "file": module.__file__, "digest": digest, "python": sys.version.split()[0]})
    if digest != request["digest"]:
        raise SystemExit(f"payload digest is {digest}, not the {request['digest']} asked for")


def probe(request: dict[str, Any], emit: Emit) -> None:
    """Reports what this interpreter has: versions, the CUDA compiler, and the GPU that torch sees."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "executable": sys.executable}
    for name in ("torch", "triton", "numpy", "tilelang", "vllm"):
        found[name] = version_of(name) if importlib.util.find_spec(name) else None
    from deepinfer_cli.validate import toolkit

    compiler = toolkit.find("nvcc")
    found["nvcc"] = str(compiler) if compiler else None
    if found["torch"]:
        found["gpu"] = _gpu()
    emit({"event": "probe", **found})


def version_of(name: str) -> str:
    """The installed version of a distribution, or `unknown` (importable, but without metadata)."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _gpu() -> dict[str, Any] | None:
    try:
        import torch

        if torch.version.hip or not torch.cuda.is_available():
            return None
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    except Exception as error:  # a broken driver is a finding, not a crash
        return {"problem": f"{type(error).__name__}: {error}"}
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
        "count": torch.cuda.device_count(),
    }


def run_cases(request: dict[str, Any], emit: Emit) -> None:
    """Numerics, on a GPU or in Triton's interpreter."""
    from deepinfer_cli.validate import numerics

    say_hello(request, emit)
    numerics.run(request, emit)


def run_compile_gate(request: dict[str, Any], emit: Emit) -> None:
    """Every variant of the op for every architecture asked for."""
    from deepinfer_cli.validate import compile_gate

    say_hello(request, emit)
    compile_gate.run(request, emit)


def run_bench(request: dict[str, Any], emit: Emit) -> None:
    """Checks, then times, the op and its baselines."""
    from deepinfer_cli.validate import bench_worker

    say_hello(request, emit)
    bench_worker.run(request, emit)


TASKS: dict[str, Task] = {
    "probe": probe,
    "cases": run_cases,
    "compile": run_compile_gate,
    "bench": run_bench,
}

if __name__ == "__main__":
    raise SystemExit(main())
