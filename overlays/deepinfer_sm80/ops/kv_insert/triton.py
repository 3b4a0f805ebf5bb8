"""The kernel of `kv_insert`, its launch, and the table of its variants."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..rope_quant import kernels
from ..spec import Variant

_POINTERS = {"latent_ptr": "*bf16", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "cache_ptr": "*u8"}
_POINTERS |= {"slots_ptr": "*i64"}
_STRIDES = ("cos_sin_stride", "page_stride")
_SIZES = ("block_size", "ratio")


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES], do_not_specialize_on_alignment=list(_POINTERS))
def _kv_insert_kernel(
    latent_ptr,
    positions_ptr,
    cos_sin_ptr,
    cache_ptr,
    slots_ptr,
    cos_sin_stride: tl.int64,
    page_stride: tl.int64,
    block_size: tl.int32,
    ratio: tl.int32,
    UNIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token)
    if (slot >= 0) & ((position + 1) % ratio == 0):
        row = slot % block_size
        page_ptr = tl.multiple_of(cache_ptr + slot // block_size * page_stride, UNIT)
        data_ptr = tl.multiple_of(page_ptr + row * 576, UNIT)
        scale_ptr = page_ptr + block_size.to(tl.int64) * 576 + row * 8
        state_ptr = tl.multiple_of(latent_ptr + token * 512, UNIT)

        # a tile's shape is a power of two, so the rotated 64 elements are an eighth group, of which nothing is stored
        group = tl.arange(0, 8)
        index = group[:, None] * 64 + tl.arange(0, 64)[None, :]
        bits = kernels.bits_of(tl.load(state_ptr + index))
        scale = kernels.scale_of(tl.max(kernels.size_of(bits), axis=1))
        code = kernels.encode(bits, scale[:, None])
        tl.store(data_ptr + index, code.to(tl.uint8), mask=(group < 7)[:, None])
        tl.store(scale_ptr + group, tl.where(group < 7, scale, 0).to(tl.uint8))

        pair = tl.arange(0, 32)
        even = tl.load(state_ptr + 448 + 2 * pair).to(tl.float32)
        odd = tl.load(state_ptr + 449 + 2 * pair).to(tl.float32)
        turn_ptr = cos_sin_ptr + position // ratio * ratio * cos_sin_stride + pair
        even, odd = kernels.rotate(even, odd, tl.load(turn_ptr), tl.load(turn_ptr + 32))
        tail = tl.interleave(even.to(tl.bfloat16), odd.to(tl.bfloat16))
        tl.store((data_ptr + 448).to(tl.pointer_type(tl.bfloat16)) + tl.arange(0, 64), tail)


def _variant(name: str, unit: int) -> Variant:
    return Variant(
        name=name,
        kernel=_kv_insert_kernel,
        signature=_POINTERS | dict.fromkeys(_STRIDES, "i64") | dict.fromkeys(_SIZES, "i32"),
        constexprs={"UNIT": unit},
        num_warps=1,
        num_stages=1,
    )


# every cache that vLLM allocates takes the first; the other serves pages at any even address
WIDE = _variant("wide", 16)
NARROW = _variant("narrow", 2)


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in (WIDE, NARROW) if arch in variant.archs)


def pick(latent: torch.Tensor, kv_cache: torch.Tensor) -> Variant:
    """The variant for these tensors' addresses and strides."""
    addresses = latent.data_ptr() | kv_cache.data_ptr() | kv_cache.stride(0)
    return WIDE if addresses % WIDE.constexprs["UNIT"] == 0 else NARROW


def launch(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """Launches the kernel on checked arguments, one program per token."""
    variant = pick(latent, kv_cache)
    _kv_insert_kernel[(slot_mapping.shape[0],)](
        latent,
        positions,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        cos_sin_cache.stride(0),
        kv_cache.stride(0),
        kv_cache.shape[1],
        compress_ratio,
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
