"""What this vLLM's portable class looks like, asked of its own code; a class that we do not know is refused."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..bindings.spec import BindError

# fmt: off
PREFILL = ("self", "q", "positions", "compressed_k_cache", "swa_k_cache", "output", "attn_metadata", "swa_metadata")
DECODE = ("self", "q", "kv_cache", "swa_metadata", "attn_metadata", "swa_only", "output")
ROTATING_DECODE = (
    "self", "q", "positions", "kv_cache", "swa_metadata", "attn_metadata", "swa_only", "output", "output_mxfp8",
)
# fmt: on
OUT = "mxfp8_out"
WHOLE = ("self", "q", "kv", "positions", "output")
PROJECTIONS: dict[tuple[str, ...], bool] = {
    ("self", "o", "positions"): True,
    ("self", "attn_out", "positions"): False,
}
PLAN = "get_prefill_chunk_plan"
HINT = "max_gather_len"
# the functions by which prefill does its work, in the module's own names
PREFILL_CALLS = frozenset(
    {
        "combine_topk_swa_indices",
        "current_workspace_manager",
        "dequantize_and_gather_k_cache",
        "rocm_sparse_attn_prefill",
    }
)


@dataclass(frozen=True)
class Layout:
    """How the portable class of a release works.

    Attributes:
        rotates_all: `_o_proj` rotates every row back (0.30). Otherwise `forward_mqa` does, from the row on that
            `_forward_decode` returns.
        planned: prefill asks the metadata for chunks of their own widths (0.32 and later), instead of four requests each
            in the widest layout there can be.
        hint: the gather takes `max_gather_len`.
    """

    rotates_all: bool
    planned: bool
    hint: bool


def read(rocm: ModuleType, stock: type) -> Layout:
    """The layout of the class `stock` in the module `rocm`.

    Raises:
        BindError: a method is missing or has parameters that no supported release has, or calls what it should not.
    """
    rotates_all = _known(stock, "_o_proj", PROJECTIONS)
    rotating = _known(stock, "_forward_decode", {DECODE: False, ROTATING_DECODE: True})
    prefills: dict[tuple[str, ...], bool] = {PREFILL: False, (*PREFILL, OUT): True}
    with_out = _known(stock, "_forward_prefill", prefills)
    _known(stock, "forward_mqa", {WHOLE: True})
    if not rotates_all == (not rotating) == (not with_out):
        raise BindError(f"{stock.__name__} mixes methods of several releases")
    names = set(_method(stock, "_forward_prefill").__code__.co_names)
    missing = sorted(PREFILL_CALLS - names) + sorted(
        name for name in PREFILL_CALLS if not hasattr(rocm, name)
    )
    if missing:
        raise BindError(f"{stock.__name__}._forward_prefill does not call {', '.join(missing)}")
    rotates = "rocm_inverse_rope_rows_" in _method(stock, "forward_mqa").__code__.co_names
    if rotates == rotates_all:
        raise BindError(
            f"{stock.__name__}: {'two places rotate' if rotates else 'nothing rotates'} attention's output"
        )
    gather = inspect.signature(rocm.dequantize_and_gather_k_cache).parameters
    return Layout(rotates_all, PLAN in names, HINT in gather)


def _known(stock: type, name: str, known: dict[tuple[str, ...], bool]) -> bool:
    found = tuple(inspect.signature(_method(stock, name)).parameters)
    if found not in known:
        raise BindError(f"{stock.__name__}.{name} has unknown parameters ({', '.join(found[1:])})")
    return known[found]


def _method(stock: type, name: str) -> Any:
    found = vars(stock).get(name)
    if not inspect.isfunction(found):
        raise BindError(f"{stock.__name__} has no method {name} of its own")
    return found
