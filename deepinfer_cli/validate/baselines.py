"""What the overlay is measured against, loaded from a real vLLM inside a worker; nothing of it is copied here."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYOUTS = ("deepseek_v41", "deepseek_v4_1")
OVERLAY, STOCK, GRID, TORCH = "overlay", "stock", "stock-0.30-grid", "torch"
# op → provider → function of common/ops/cache_utils.py
_STOCK = {
    "gather": {STOCK: "dequantize_and_gather_k_cache", GRID: "dequantize_and_gather_k_cache_triton"},
    "combine": {STOCK: "combine_topk_swa_indices"},
}
# op → function of 0.30's and 0.31's amd/rocm.py, a chain of PyTorch operations that synchronises
_TORCH = {"combine": "combine_topk_swa_indices"}


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of an op.

    Attributes:
        name: as in a result row.
        function: takes the op's keyword arguments; None means the overlay's own.
        timings: how it can be timed; `events` alone for what synchronises.
        problem: why it cannot be measured; empty when it can.
        source: where it was loaded from.
    """

    name: str
    function: Callable[..., Any] | None = None
    timings: tuple[str, ...] = ("graph",)
    problem: str = ""
    source: str = ""


def providers(op: str, workloads: Any, parent: Path | None, torch_from: Path | None) -> list[Provider]:
    """The overlay and its baselines for `op`, in the order of the result.

    Args:
        op: name of the op.
        workloads: its workloads module.
        parent: folder of the target's `vllm`; None measures without stock.
        torch_from: a 0.30 or 0.31 tree (or its `amd/rocm.py`) for the torch baseline, default the target.
    """
    torch_chain = _torch_provider(op, workloads, torch_from or parent) if op in _TORCH else None
    timings = ("graph", "events") if torch_chain and not torch_chain.problem else ("graph",)
    found = [Provider(OVERLAY, timings=timings)]
    for name, symbol in _STOCK.get(op, {}).items():
        try:
            function, source = load_stock(parent, symbol)
            found.append(Provider(name, adapt(function, workloads, name), source=source))
        except Exception as error:
            found.append(Provider(name, problem=f"{type(error).__name__}: {error}"[:500]))
    return [*found, *([torch_chain] if torch_chain else [])]


def adapt(function: Callable[..., Any], workloads: Any, style: str) -> Callable[..., Any]:
    """`function` with the op's keyword contract; arguments that this release does not know are left out."""
    known = inspect.signature(function).parameters

    def call(**inputs: Any) -> Any:
        arguments = workloads.call_kwargs(inputs, style)
        return function(**{name: value for name, value in arguments.items() if name in known})

    return call


def layout_of(package: Path) -> str:
    """The V4.1 folder below `package`/models.

    Raises:
        FileNotFoundError: there is none.
    """
    for layout in LAYOUTS:
        if (package / "models" / layout).is_dir():
            return layout
    raise FileNotFoundError(f"{package} has no DeepSeek-V4.1")


def load_stock(parent: Path | None, symbol: str) -> tuple[Callable[..., Any], str]:
    """The target's own function, with the overlay switched off while its module is imported.

    Raises:
        ImportError: this vLLM cannot be imported here, or another one was.
        Exception: whatever vLLM raises during its import.
    """
    if parent is None:
        raise ImportError("no vLLM was named, so there is no stock function to measure")
    name = f"vllm.models.{layout_of(parent / 'vllm')}"
    if str(parent) not in sys.path:
        sys.path.insert(0, str(parent))
    with _overlay_off():
        vllm = importlib.import_module("vllm")
        if Path(str(vllm.__file__)).resolve().parent != (parent / "vllm").resolve():
            raise ImportError(f"vllm came from {vllm.__file__}, not from {parent}")
        module = _import_ops(name, parent)
    function = getattr(module, symbol)
    if hasattr(function, "__deepinfer__"):
        raise ImportError(f"{symbol} is bound to the overlay although it is switched off")
    return function, str(module.__file__)


def _import_ops(name: str, parent: Path) -> types.ModuleType:
    """`<name>.common.ops.cache_utils`, without the models that the package itself would import."""
    module = f"{name}.common.ops.cache_utils"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(parent.joinpath(*name.split(".")))]
        sys.modules[name] = package
        try:
            return importlib.import_module(module)
        except Exception:
            # something there does need the whole package
            for loaded in [key for key in sys.modules if f"{key}.".startswith(f"{name}.")]:
                del sys.modules[loaded]
    return importlib.import_module(module)


@contextmanager
def _overlay_off() -> Iterator[None]:
    before = os.environ.get("DEEPINFER_DISABLE")
    os.environ["DEEPINFER_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DEEPINFER_DISABLE"]
        else:
            os.environ["DEEPINFER_DISABLE"] = before


def _torch_provider(op: str, workloads: Any, tree: Path | None) -> Provider:
    try:
        path = rocm_file(tree)
        function = extract_function(path, _TORCH[op])
    except (OSError, ValueError, SyntaxError) as error:
        return Provider(TORCH, timings=("events",), problem=f"{error}; --torch-from takes a vLLM 0.30.0 tree")
    return Provider(TORCH, adapt(function, workloads, TORCH), ("events",), source=str(path))


def rocm_file(tree: Path | None) -> Path:
    """`amd/rocm.py` of a tree: its file, the tree's `vllm`, or the folder that contains it.

    Raises:
        FileNotFoundError: there is none.
    """
    if tree is None:
        raise FileNotFoundError("no vLLM was named")
    if tree.is_file():
        return tree
    package = tree if tree.name == "vllm" else tree / "vllm"
    path = package / "models" / layout_of(package) / "amd" / "rocm.py"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    return path


def extract_function(path: Path, name: str) -> Callable[..., Any]:
    """The function `name` of a module that cannot be imported here, with the constants it uses.

    Raises:
        ValueError: the module does not define it, or it is no plain PyTorch function.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(functions) != 1 or functions[0].decorator_list:
        raise ValueError(f"{path} has no function {name} that can be taken alone")
    used = {node.id for node in ast.walk(functions[0]) if isinstance(node, ast.Name)}
    constants = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(item, ast.Name) and item.id in used for item in node.targets)
        and isinstance(node.value, ast.Constant)
    ]
    import torch

    scope: dict[str, Any] = {"torch": torch}
    program = ast.Module(body=[*constants, *functions], type_ignores=[])
    exec(compile(program, str(path), "exec"), scope)
    function = scope[name]
    loaded = used & set(function.__code__.co_names)
    unknown = sorted(key for key in loaded if key not in scope and not hasattr(builtins, key))
    if unknown:
        raise ValueError(f"{name} in {path} also needs {', '.join(unknown)}")
    return function  # type: ignore[no-any-return]
