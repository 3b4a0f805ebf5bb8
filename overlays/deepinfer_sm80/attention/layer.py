"""The CUDA layer: a subclass of the portable class, of which only what differs on an NVIDIA card is written here."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

from ..bindings import is_ours
from . import layout, prefill, retained
from . import shared as sharing

NAME = "DeepInferSM8xAttention"


def make(rocm: ModuleType, stock: type, *, shared: bool) -> type:
    """The layer class for SM8x.

    Args:
        rocm: the module of the portable class.
        stock: the portable class.
        shared: prefill's layers share what they can (`yoco`); otherwise each layer runs stock's own `_forward_prefill`.

    Raises:
        BindError: `stock` is not the class of a release that we know.
    """
    form = layout.read(rocm, stock)
    # `super()` without arguments needs a class statement of its own
    made = _base(stock)
    if not form.rotates_all:
        made = _rotating(rocm, made)
    if shared:
        made = _sharing(rocm, made, form)
    made.__name__ = made.__qualname__ = NAME
    return made


def _base(stock: Any) -> Any:
    class Layer(stock):
        """`wo_a` unpacked, and no kernel of aiter."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # the portable class unsets it. On CUDA that would let Marlin repack the weight, and the product needs it
            # in rows: as a batched product it is unpacked to bfloat16 when it is loaded
            self.wo_a.is_bmm = True
            self._use_aiter_sparse_mla = False

    return Layer


def _rotating(rocm: ModuleType, base: Any) -> Any:
    class Layer(base):
        """0.31 and later: `forward_mqa` rotates the rows from the number on that `_forward_decode` returns."""

        def _forward_decode(self, *args: Any, **kwargs: Any) -> int:
            rotated = super()._forward_decode(*args, **kwargs)
            # stock's returns all rows on any card and rotates them on two of AMD's
            return rotated if is_ours(rocm.rocm_sparse_attn_decode) else 0

        def _wo_b_after_wo_a(self, zf: Any) -> Any:
            # the base class's way also serves a fused reduce-scatter, which sequence parallelism may have bound
            return self._wo_b_proj(zf)

    return Layer


def _one_start(backend: Any) -> Any:
    """The window's backend, with builders that say that nothing is replayed by one tensor.

    In stock each group of window caches has zeros of its own for it (0.31 and later), so that layers of two groups could not be
    seen to gather the same rows. Nobody writes to them.
    """
    starts: dict[Any, Any] = {}

    class Builder(backend.get_builder_cls()):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            own = getattr(self, "no_replay_start", None)
            if own is not None:
                self.no_replay_start = starts.setdefault((own.device, own.dtype, own.shape), own)

    class Backend(backend):
        @staticmethod
        def get_builder_cls() -> type:
            return Builder

    return Backend


def _sharing(rocm: ModuleType, base: Any, form: layout.Layout) -> Any:
    class Layer(base):
        """Prefill with what earlier layers of the step have built (`shared.py`)."""

        swa_backend_cls = _one_start(base.swa_backend_cls)

        def forward(self, positions: Any, hidden_states: Any, llama_4_scaling: Any = None) -> Any:
            with sharing.profiled(self, rocm.get_forward_context(), len(positions)):
                return super().forward(positions, hidden_states, llama_4_scaling)

        def forward_mqa(self, q: Any, kv: Any, positions: Any, output: Any) -> None:
            # without metadata it only reserves what prefill will ask for
            profile = rocm.get_forward_context().attn_metadata is None
            with retained.own() if profile else nullcontext():
                super().forward_mqa(q, kv, positions, output)

        # fmt: off
        def _forward_prefill(
            self, q: Any, positions: Any, compressed_k_cache: Any, swa_k_cache: Any, output: Any, attn_metadata: Any,
            swa_metadata: Any, mxfp8_out: Any = None,
        ) -> None:
            # fmt: on
            if mxfp8_out is not None:
                raise ValueError("mxfp8_out is an output of AMD's gfx950, there is none on an NVIDIA card")
            prefill.run(rocm, form, self, q, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata)

    return Layer
