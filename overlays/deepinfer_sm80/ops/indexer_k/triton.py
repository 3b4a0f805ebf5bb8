"""The kernel of `indexer_k`, its launch, and the table of its variants."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..rope_quant import kernels
from ..spec import Variant

_POINTERS = {"k_pre_ptr": "*bf16", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "weight_ptr": "*bf16"}
_POINTERS |= {"cache_ptr": "*u8", "slots_ptr": "*i64"}
_STRIDES = ("k_pre_stride", "cos_sin_stride", "page_stride")
_SIZES = ("block_size", "ratio")


@triton.jit(
    do_not_specialize=[*_STRIDES, *_SIZES, "eps"],
    do_not_specialize_on_alignment=list(_POINTERS),
)
def _indexer_k_kernel(
    k_pre_ptr,
    positions_ptr,
    cos_sin_ptr,
    weight_ptr,
    cache_ptr,
    slots_ptr,
    k_pre_stride: tl.int64,
    cos_sin_stride: tl.int64,
    page_stride: tl.int64,
    block_size: tl.int32,
    ratio: tl.int32,
    eps,
    UNIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token)
    if (slot >= 0) & ((position + 1) % ratio == 0):
        pair = tl.arange(0, 64)
        key_ptr = tl.multiple_of(k_pre_ptr + token * k_pre_stride, UNIT)
        even, odd = _split(tl.load(key_ptr + tl.arange(0, 128)))
        scale_even, scale_odd = _split(tl.load(weight_ptr + tl.arange(0, 128)))
        root = _inverse_root(even, odd, eps)
        even = (even * root * scale_even).to(tl.bfloat16).to(tl.float32)
        odd = (odd * root * scale_odd).to(tl.bfloat16).to(tl.float32)

        turn_ptr = cos_sin_ptr + position // ratio * ratio * cos_sin_stride + pair - 32
        cos = tl.load(turn_ptr, mask=pair >= 32, other=1.0)
        sin = tl.load(turn_ptr + 32, mask=pair >= 32, other=0.0)
        even, odd = kernels.rotate(even, odd, cos, sin)
        bits = kernels.bits_of(tl.interleave(even.to(tl.bfloat16), odd.to(tl.bfloat16)))
        scale = kernels.scale_of(tl.max(kernels.size_of(bits), axis=0))

        row = slot % block_size
        page_ptr = tl.multiple_of(cache_ptr + slot // block_size * page_stride, UNIT)
        codes = kernels.encode(bits, scale).to(tl.uint8)
        tl.store(tl.multiple_of(page_ptr + row * 128, UNIT) + tl.arange(0, 128), codes)
        scale_ptr = (page_ptr + block_size.to(tl.int64) * 128).to(tl.pointer_type(tl.float32)) + row
        tl.store(scale_ptr, kernels.scale_value(scale))


@triton.jit
def _split(values):
    return tl.split(tl.reshape(values.to(tl.float32), (64, 2)))


@triton.jit
def _inverse_root(even, odd, eps):
    """1 / sqrt(mean + eps) of a key's squares, as float32: the same whatever the order of the sum."""
    even, odd = even.to(tl.float64), odd.to(tl.float64)
    mean = (tl.sum(even * even + odd * odd, axis=0) * (1.0 / 128)).to(tl.float32) + eps
    rough = tl.rsqrt(mean)
    # one step of Newton's method takes the 22 bits that the hardware has to more than float32 holds
    wide = rough.to(tl.float64)
    fine = (wide * (1.5 - 0.5 * mean.to(tl.float64) * wide * wide)).to(tl.float32)
    return tl.where(rough == 0, 0.0, fine)


def _variant(name: str, unit: int) -> Variant:
    return Variant(
        name=name,
        kernel=_indexer_k_kernel,
        signature=_POINTERS | dict.fromkeys(_STRIDES, "i64") | dict.fromkeys(_SIZES, "i32") | {"eps": "fp32"},
        constexprs={"UNIT": unit},
        num_warps=1,
        num_stages=1,
    )


# every cache that vLLM allocates takes the first; the other serves pages on any word
WIDE = _variant("wide", 16)
NARROW = _variant("narrow", 2)


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in (WIDE, NARROW) if arch in variant.archs)


def pick(k_pre: torch.Tensor, k_cache: torch.Tensor) -> Variant:
    """The variant for these tensors' addresses and strides."""
    addresses = k_pre.data_ptr() | 2 * k_pre.stride(0) | k_cache.data_ptr() | k_cache.stride(0)
    return WIDE if addresses % WIDE.constexprs["UNIT"] == 0 else NARROW


def launch(
    k_pre: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """Launches the kernel on checked arguments, one program per token."""
    variant = pick(k_pre, k_cache)
    _indexer_k_kernel[(slot_mapping.shape[0],)](
        k_pre,
        positions,
        cos_sin_cache,
        norm_weight,
        k_cache,
        slot_mapping,
        k_pre.stride(0),
        cos_sin_cache.stride(0),
        k_cache.stride(0),
        k_cache.shape[1],
        compress_ratio,
        float(norm_eps),
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
