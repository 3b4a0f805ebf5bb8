"""Every binding, and putting those of one module in place; imports neither torch nor vLLM."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

from . import (
    attention_common,
    cache_utils,
    engram,
    fused_compress_quant_cache,
    fused_indexer_q,
    indexer_k_store,
    indexer_metadata,
    kv_cache_planning,
    kv_cache_utils,
    mhc_tilelang,
    mhc_warmup,
    model_state,
    nvidia_model,
    pp_utils,
    rocm,
    rocm_aiter_mla_sparse,
    sparse_attn_indexer,
    sparse_swa,
    workspace,
)
from .spec import BindError, Binding

__all__ = ["ALL", "LAYOUTS", "OPS", "BindError", "Binding", "attach", "find", "is_ours"]

# V4.1's folder in vLLM, and in the forks that came before it
LAYOUTS = ("deepseek_v41", "deepseek_v4_1")
_MODULES = (
    cache_utils,
    rocm,
    rocm_aiter_mla_sparse,
    mhc_tilelang,
    mhc_warmup,
    engram,
    fused_compress_quant_cache,
    indexer_k_store,
    fused_indexer_q,
    nvidia_model,
    attention_common,
    indexer_metadata,
    sparse_attn_indexer,
    sparse_swa,
    kv_cache_utils,
    kv_cache_planning,
    model_state,
    pp_utils,
    workspace,
)
ALL: dict[str, tuple[Binding, ...]] = {module.MODULE: module.BINDINGS for module in _MODULES}
OPS = tuple(sorted({binding.op for bindings in ALL.values() for binding in bindings}))


def find(name: str) -> tuple[Binding, ...]:
    """The bindings of the vLLM module `name`.

    Raises:
        BindError: there are none, so a hook and this payload are not of one release.
    """
    _, _, path = name.partition(".")
    for template, bindings in ALL.items():
        if path in {template.format(layout=layout) for layout in LAYOUTS}:
            return bindings
    raise BindError(f"this overlay has nothing to bind in {name}")


def attach(name: str, ops: Iterable[str]) -> list[Binding]:
    """Put the bindings of `ops` in place in the module `name`, all or none; those in place already are kept.

    A binding that serves all ops is put in place for any of them; where its own op is off, only if it fits.

    Returns:
        The bindings of `ops` that are in place now.

    Raises:
        BindError: a symbol is missing, comes from another module or has an unknown signature.
    """
    ops = set(ops)
    wanted = [binding for binding in find(name) if binding.op in ops]
    extra = [binding for binding in find(name) if binding.serves_all and ops and binding.op not in ops]
    module = sys.modules.get(name)
    if module is None:
        raise BindError(f"{name} is not an imported module")
    ready = [(binding, *_replacement(binding, module)) for binding in wanted]
    for binding in extra:
        # its op is off, maybe for this very reason
        with suppress(BindError):
            ready.append((binding, *_replacement(binding, module)))
    for binding, owner, replacement in ready:
        setattr(owner, binding.symbol.rpartition(".")[2], replacement)
    return wanted


def is_ours(value: Any) -> bool:
    """Whether `value` is a replacement made by this overlay."""
    # a layer asks at every step, so not statically. vLLM puts stand-ins for packages that are not there into its
    # modules, and they raise for any attribute
    try:
        return isinstance(getattr(value, "__deepinfer__", None), dict)
    except Exception:
        return False


def _replacement(binding: Binding, module: ModuleType) -> tuple[Any, Callable[..., Any]]:
    """Where the symbol lives (module or class) and what goes there."""
    label = f"{module.__name__}.{binding.symbol} (op {binding.op})"
    *path, last = binding.symbol.split(".")
    owner: Any = module
    for part in path:
        owner = vars(owner).get(part)
        if owner is None:
            raise BindError(f"{label} is missing: no {part}")
    if last not in vars(owner):
        raise BindError(f"{label} is missing")
    stock = vars(owner)[last]
    if binding.origin is not None:
        if not is_ours(stock) and stock is not getattr(sys.modules.get(binding.origin), last, None):
            raise BindError(f"{label} is not what {binding.origin} has by that name")
    elif (inspect.isroutine(stock) or inspect.isclass(stock)) and stock.__module__ != module.__name__:
        raise BindError(f"{label} is not defined there but comes from {stock.__module__}")
    if is_ours(stock):
        return owner, stock
    try:
        return owner, binding.adapt(stock, module.__name__)
    except BindError as error:
        raise BindError(f"{label} {error}") from None
