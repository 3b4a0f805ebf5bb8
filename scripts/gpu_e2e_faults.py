"""Faults that `gpu_e2e.py` plants in a running child, one at a time; each must make the end-to-end check fail.

Loaded by path in the child (`request["plugin"]`). They sit on the names that the attention class calls through its
module, so they change nothing on disk and are gone when undone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

LAYOUT = "vllm.models.deepseek_v41"
RECORD, DATA, SCALES = 584, 576, 8
BLOCK = 64

Undo = Callable[[], None]


def prepare(request: dict[str, Any]) -> None:
    """Nothing has to be so before the engine starts."""


def plant(name: str, engine: Any) -> Undo:
    """Plants the fault `name`; the result undoes it."""
    return FAULTS[name]()


def _unrotated_decode() -> Undo:
    """Decode's rows are counted as rotated and are not."""

    def wrong(real: Any, given: dict[str, Any]) -> Any:
        count = given["output"].shape[0]
        real(**{**given, "inv_rope_positions": None, "inv_rope_cos_sin_cache": None})
        return count

    return _wrap(_rocm(), "rocm_sparse_attn_decode", wrong)


def _previous_group() -> Undo:
    """Prefill of the second index group attends to what the first one has selected."""
    shared = importlib.import_module("vllm.deepinfer_sm80.attention.shared")
    real = shared.tables

    def tables(step: Any, rocm: Any, layer: Any, *args: Any) -> Any:
        kept = step.tables.get(False)
        if not args[-1] and layer.index_source_layer_id == 6 and kept is not None:
            return kept[1]
        return real(step, rocm, layer, *args)

    return _set(shared, "tables", tables)


def _sink_dropped() -> Undo:
    def wrong(real: Any, given: dict[str, Any]) -> Any:
        return real(**{**given, "attn_sink": None})

    first = _wrap(_rocm(), "rocm_sparse_attn_prefill", wrong)
    second = _wrap(_rocm(), "rocm_sparse_attn_decode", wrong)

    def undo() -> None:
        first()
        second()

    return undo


def _window_short() -> Undo:
    """Prefill's window has 127 rows."""

    def wrong(real: Any, given: dict[str, Any]) -> Any:
        return real(**{**given, "window_size": given["window_size"] - 1})

    return _wrap(_rocm(), "combine_topk_swa_indices", wrong)


def _scale_ignored() -> Undo:
    """The fourth of the seven UE8M0 scales of every gathered row counts as 1.0."""

    def wrong(real: Any, given: dict[str, Any]) -> Any:
        result = real(**given)
        _ignore_scale(3, **{name: given[name] for name in GATHERED})
        return result

    return _wrap(_rocm(), "dequantize_and_gather_k_cache", wrong)


GATHERED = ("out", "k_cache", "seq_lens", "gather_lens", "block_table", "block_size", "offset")


def _ignore_scale(
    which: int,
    out: Any,
    k_cache: Any,
    seq_lens: Any,
    gather_lens: Any,
    block_table: Any,
    block_size: int,
    offset: int,
) -> None:
    import torch

    pages = torch.as_strided(k_cache, (k_cache.shape[0], block_size * RECORD), (k_cache.stride(0), 1))
    ends = seq_lens.tolist()
    counts = ends if gather_lens is None else gather_lens.tolist()
    for request, (end, count) in enumerate(zip(ends, counts, strict=True)):
        if count <= 0:
            continue
        position = torch.arange(end - count, end, device=out.device)
        page = block_table[request][position // block_size].long()
        scale = pages[page, block_size * DATA + position % block_size * SCALES + which]
        rows = out[request, offset : offset + count, which * BLOCK : (which + 1) * BLOCK]
        rows *= torch.exp2(127.0 - scale.float()).to(rows.dtype)[:, None]


def _engram_skipped() -> Undo:
    """The tables are not read."""
    table = importlib.import_module(f"{LAYOUT}.common.engram").ParallelEngramEmbedding

    def lookup(self: Any, indices: Any, out: Any, background: bool = False) -> None:
        out.zero_()

    return _set(table, "lookup", lookup)


FAULTS: dict[str, Callable[[], Undo]] = {
    "unrotated decode": _unrotated_decode,
    "previous index group": _previous_group,
    "sink dropped": _sink_dropped,
    "window off by one": _window_short,
    "one scale ignored": _scale_ignored,
    "Engram skipped": _engram_skipped,
}


def _rocm() -> Any:
    return importlib.import_module(f"{LAYOUT}.amd.rocm")


def _wrap(module: Any, name: str, wrong: Callable[[Any, dict[str, Any]], Any]) -> Undo:
    """Puts `wrong` in front of a function; it gets that and the arguments by name."""
    real = getattr(module, name)
    signature = inspect.signature(real)

    @functools.wraps(real)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return wrong(real, bound.arguments)

    if not hasattr(wrapper, "__deepinfer__"):
        raise RuntimeError(f"{module.__name__}.{name} is not ours: the fault would be in stock's")
    return _set(module, name, wrapper)


def _set(owner: Any, name: str, value: Any) -> Undo:
    before = vars(owner)[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)
