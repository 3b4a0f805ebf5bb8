"""Compiles every kernel that the engine can meet before it serves, once per process.

vLLM's own warm-up sees to it (`bindings/mhc_warmup.py`). For engines that were started without one so does the first
call of any op: mHC's is in vLLM's profile run, attention's in the runs before CUDA graphs are captured.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from . import gate

# ops, and hidden sizes of mHC, that are compiled
_done: set[str | int] = set()


def up(hidden: int | None = None) -> None:
    """Compiles what no earlier call has: the variants of every bound op, mHC's for streams of `hidden` elements if given.

    Raises:
        Exception: whatever Triton or TileLang raises when a kernel does not compile: better now than in a request.
    """
    from . import bound_ops

    ops = sorted(bound_ops())
    if hidden is not None and hidden not in _done and any(op.startswith("mhc_") for op in ops):
        from .ops.mhc.tilelang import warm_up

        warm_up(hidden)
        _done.add(hidden)
    for op in ops:
        if not op.startswith("mhc_") and op not in _done:
            op_up(op)
            _done.add(op)


def first_call(key: str | int) -> None:
    """Sees to it that an op, or mHC of a hidden size, is compiled, and all the others with it; costs a look-up if it is.

    Raises:
        Exception: as `up`.
    """
    if key in _done:
        return
    up(key if isinstance(key, int) else None)
    _done.add(key)


def op_up(op: str) -> None:
    """Compiles every variant of one op for `gate.device()`: those of its `triton.py` and of its `tilelang.py`."""
    device = gate.device()
    if device is None:
        return
    for variant in _variants(op, "triton", device.arch):
        triton_up(variant)
    tile_variants = _variants(op, "tilelang", device.arch)
    # without TileLang or its nvcc an op runs its Triton kernels
    if tile_variants and importlib.util.find_spec("tilelang") is not None:
        from . import tile

        if tile.find_nvcc()[0]:
            tile.warm_up(tile_variants)


def triton_up(variant: Any) -> Any:
    """Compiles a Triton variant as its launch would, without launching; returns the compiled kernel.

    Everything that the launch passes is either pinned to the type in the variant's signature or kept out of Triton's
    specialisation, so stand-ins of these types give the launch's own key.
    """
    import torch

    pointers = {"*bf16": torch.bfloat16, "*fp32": torch.float32, "*u8": torch.uint8}
    pointers |= {"*i32": torch.int32, "*i64": torch.int64}
    numbers = {"i32": 16, "i64": 16, "fp32": 1.5}
    values = {name: pointers.get(kind, numbers.get(kind)) for name, kind in variant.signature.items()}
    values |= variant.constexprs
    # by position: Triton takes a dtype for a stand-in of a tensor only there
    return variant.kernel.warmup(
        *(values[name] for name in variant.kernel.arg_names),
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        grid=(1,),
    )


def _variants(op: str, kind: str, arch: str) -> tuple[Any, ...]:
    package = __name__.rpartition(".")[0]
    folder = f"{package}.ops.{op}"
    # an op of bindings alone has no folder
    if importlib.util.find_spec(folder) is None or importlib.util.find_spec(f"{folder}.{kind}") is None:
        return ()
    return tuple(importlib.import_module(f"{folder}.{kind}").variants(arch))
