"""What the overlay is measured against, loaded from a real vLLM inside a worker; nothing of it is copied here."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.validate.codegen import OVERLAY, STOCK_SM80
from deepinfer_cli.validate.stock import COPY, MHC, PLAIN, Source, layout_of, load

STOCK, GRID, TORCH = "stock", "stock-0.30-grid", "torch"
NAMES = (OVERLAY, STOCK, STOCK_SM80, GRID, TORCH)

_CACHE = ("vllm.models.{layout}.common.ops.cache_utils", "vllm.models.{layout}")
_INSERT = ("vllm.models.{layout}.common.ops.fused_compress_quant_cache", "vllm.models.{layout}")
_INDEXER_K = ("vllm.models.{layout}.common.ops.indexer_k_store", "vllm.models.{layout}")
_INDEXER_Q = ("vllm.models.deepseek_v4.common.ops.fused_indexer_q", "vllm.models.deepseek_v4")
_SPARSE = ("vllm.v1.attention.ops.rocm_aiter_mla_sparse", "")
_MHC = ("vllm.model_executor.kernels.mhc.tilelang", "vllm.model_executor.kernels.mhc")


def _function(place: tuple[str, str], symbol: str, how: str = "plain") -> Source:
    return Source(place[0], symbol, place[1], how)


def _mhc(symbol: str) -> dict[str, Source]:
    return {STOCK: _function(_MHC, symbol, MHC)}


# op → provider → where its function is
_STOCK: dict[str, dict[str, Source]] = {
    "gather": {
        STOCK: _function(_CACHE, "dequantize_and_gather_k_cache"),
        GRID: _function(_CACHE, "dequantize_and_gather_k_cache_triton"),
    },
    "combine": {
        STOCK: _function(_CACHE, "combine_topk_swa_indices"),
        STOCK_SM80: _function(_CACHE, "combine_topk_swa_indices", COPY),
    },
    "ragged": {
        STOCK: _function(_SPARSE, "build_ragged_indices_from_dense"),
        STOCK_SM80: _function(_SPARSE, "build_ragged_indices_from_dense", COPY),
    },
    "sparse_prefill": {
        STOCK: _function(_SPARSE, "rocm_sparse_attn_prefill"),
        STOCK_SM80: _function(_SPARSE, "rocm_sparse_attn_prefill", COPY),
    },
    # these kernels have fp8 conversions, which sm80 code cannot have
    "sparse_decode": {STOCK: _function(_SPARSE, "rocm_sparse_attn_decode")},
    "kv_insert": {STOCK: _function(_INSERT, "rope_quant_insert")},
    "indexer_k": {STOCK: _function(_INDEXER_K, "indexer_k_norm_rope_store")},
    "indexer_q": {STOCK: _function(_INDEXER_Q, "fused_indexer_q_rope_quant")},
    "mhc_post": _mhc("mhc_post_tilelang"),
    "mhc_pre_delayed": _mhc("mhc_pre_delayed_tilelang"),
    "mhc_fused_post_pre_delayed": _mhc("mhc_fused_post_pre_delayed_tilelang"),
}
# ops that stock computes in another order of float32 sums than the oracle states: its bf16 results may be two steps away
_OTHER_ORDER = ("mhc_post", "mhc_pre_delayed", "mhc_fused_post_pre_delayed")
_TWO_STEPS = {"max_abs": 2e-3, "max_rel": 2.0**-6}
# op → function of 0.30's and 0.31's amd/rocm.py, a chain of PyTorch operations that synchronises
_TORCH = {"combine": "combine_topk_swa_indices"}
TORCH_OPS = frozenset(_TORCH)


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of an op.

    Attributes:
        name: as in a result row.
        function: takes the op's keyword arguments; None means the overlay's own.
        timings: how it can be timed; `events` alone for what synchronises.
        problem: why it cannot be measured; empty when it can.
        source: where it was loaded from.
        how: how it was loaded (see `stock`).
    """

    name: str
    function: Callable[..., Any] | None = None
    timings: tuple[str, ...] = ("graph",)
    problem: str = ""
    source: str = ""
    how: str = PLAIN


def providers(
    op: str, workloads: Any, parent: Path | None, torch_from: Path | None, forced: bool = False
) -> list[Provider]:
    """The overlay and its baselines for `op`, in the order of the result.

    Args:
        op: name of the op.
        workloads: its workloads module.
        parent: folder of the target's `vllm`; None measures without stock.
        torch_from: a 0.30 or 0.31 tree (or its `amd/rocm.py`) for the torch baseline, default the target.
        forced: the card is no SM8x: then stock's Triton kernels are measured in Ampere code too.
    """
    torch_chain = _torch_provider(op, workloads, torch_from or parent) if op in _TORCH else None
    timings = ("graph", "events") if torch_chain and not torch_chain.problem else ("graph",)
    found = [Provider(OVERLAY, timings=timings)]
    for name, source in _STOCK.get(op, {}).items():
        if name == STOCK_SM80 and not forced:
            continue
        try:
            function, path = load(parent, source)
            adapted = adapt(function, workloads, name)
            found.append(Provider(name, adapted, source=path, how=source.how))
        except Exception as error:
            found.append(Provider(name, problem=f"{type(error).__name__}: {error}"[:500]))
    return [*found, *([torch_chain] if torch_chain else [])]


class Adapted:
    """A function of vLLM with the op's keyword contract; arguments that this release does not know are left out."""

    def __init__(self, function: Callable[..., Any], workloads: Any, style: str) -> None:
        self.function, self._workloads, self._style = function, workloads, style
        self._known = inspect.signature(function).parameters

    def arguments(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The function's own arguments."""
        arguments = self._workloads.call_kwargs(inputs, self._style)
        return {name: value for name, value in arguments.items() if name in self._known}

    def __call__(self, **inputs: Any) -> Any:
        """Calls it with the op's arguments."""
        return self.function(**self.arguments(inputs))


def tolerances(op: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What a baseline's outputs are held to before it is timed: that it is the same function, mostly `asked`."""
    from deepinfer_sm80.ops.spec import Tolerance, UlpTolerance

    if op == "indexer_k":
        # its norm sums in another order: a key in some thousands has a neighbouring code
        return dict.fromkeys(asked, UlpTolerance(max_ulp=1))
    if op not in _OTHER_ORDER:
        return asked
    return dict.fromkeys(asked, Tolerance(**_TWO_STEPS))


def adapt(function: Callable[..., Any], workloads: Any, style: str) -> Adapted:
    """`function` with the op's keyword contract."""
    return Adapted(function, workloads, style)


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
