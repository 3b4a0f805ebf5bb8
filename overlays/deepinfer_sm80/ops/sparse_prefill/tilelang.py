"""The TileLang kernel's variants, what they can take, and their launch."""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from ... import tile
from ..spec import TileVariant

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

# The kernel synchronises its warps itself, where it must and nowhere else, and reads nothing out of bounds. Fast math
# means: exp2 and the one division per head within 2 units in the last place of float32, and no subnormals.
PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_data_race_check": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.enable_fast_math": True,
}
LIMIT = 2**31


def _build(warps: int) -> Any:
    from .slices import build

    return build(warps)


def _variant(heads: int, measured: str) -> TileVariant:
    return TileVariant(
        name=f"sparse_prefill-{heads}-heads",
        build=partial(_build, heads // 8),
        expects_mma=True,
        pass_configs=PASS_CONFIGS,
        measured=measured,
    )


# Both fit two (of 16 heads: four) CTAs on an SM of any of the architectures, in 48 and 36 KB. Larger tiles, with up to
# 95 KB, are at most 8 % faster where an SM has 164 KB and slower where it has 100 KB.
HEADS_16 = _variant(16, "217 TFLOP/s at 2,048 x 16 heads x 640 rows (32 heads per CTA: 125), H200, sm80 code")
HEADS_32 = _variant(32, "246 TFLOP/s at 2,048 x 64 heads x 640 rows (16 heads per CTA: 232), H200, sm80 code")


def variants(arch: str) -> tuple[TileVariant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in (HEADS_16, HEADS_32) if arch in variant.archs)


def serves(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the kernel can take these tensors: on a GPU, TileLang there, 16-byte rows, strides below 2^31."""
    if not q.is_cuda or not _installed():
        return False
    strides = (q.stride(0), q.stride(1), kv.stride(0), out.stride(0), out.stride(1))
    together = 0
    for stride in strides:
        together |= stride
    addresses = q.data_ptr() | kv.data_ptr() | out.data_ptr()
    return bool((addresses | 2 * together) % 16 == 0 and max(strides) < LIMIT)


def pick(heads: int) -> TileVariant:
    """The variant for so many heads: blocks of 32, of 16 where those would be half empty."""
    return HEADS_16 if -heads % 32 >= 16 else HEADS_32


def launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    indices: torch.Tensor,
    starts: torch.Tensor,
    *,
    ragged: bool,
) -> None:
    """Launches the kernel on checked arguments that it `serves`; `starts` is indptr or lengths."""
    import torch

    if indices.numel() == 0 or kv.shape[0] == 0:
        # there is nothing to attend to, and memory of no size has no address
        out.zero_()
        return
    width, stride = indices.shape[-1], indices.stride(0)
    if not ragged:
        indices = indices.as_strided(((indices.shape[0] - 1) * stride + width,), (1,))
    tile.kernel(pick(q.shape[1]))(
        q,
        kv,
        out,
        # never read without a sink
        starts.view(torch.float32) if sink is None else sink,
        indices,
        starts,
        scale,
        stride,
        width,
        int(ragged),
        int(sink is not None),
    )


@lru_cache
def _installed() -> bool:
    """Whether TileLang and the nvcc that it calls are there; says so once where only nvcc is missing."""
    if importlib.util.find_spec("tilelang") is None:
        return False
    found, nvcc = tile.find_nvcc()
    if not found:
        _log.warning("sparse prefill runs its Triton kernel: TileLang is there, but of nvcc %s", nvcc)
    return found
