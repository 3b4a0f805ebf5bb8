"""The sparse prefill kernel, its launch, and the table of its variants."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..spec import Variant

_POINTERS = {"q_ptr": "*bf16", "kv_ptr": "*bf16", "out_ptr": "*bf16", "sink_ptr": "*fp32"}
_POINTERS |= {"indices_ptr": "*i32", "starts_ptr": "*i32"}
_STRIDES = (
    "q_stride_token",
    "q_stride_head",
    "kv_stride",
    "out_stride_token",
    "out_stride_head",
    "indices_stride",
)
_SIZES = ("heads", "kv_rows", "width", "ragged", "has_sink")


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES, "scale"], do_not_specialize_on_alignment=list(_POINTERS))
def _sparse_prefill_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    sink_ptr,
    indices_ptr,
    starts_ptr,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    kv_stride: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    indices_stride: tl.int64,
    heads: tl.int32,
    kv_rows: tl.int32,
    width: tl.int32,
    ragged: tl.int32,
    has_sink: tl.int32,
    scale: tl.float32,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
):
    # the head blocks of a token are neighbours: they read the same rows
    blocks = tl.cdiv(heads, BLOCK_H)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, 512)
    row = tl.arange(0, BLOCK_N)
    if ragged != 0:
        begin = tl.load(starts_ptr + token).to(tl.int64)
        count = (tl.load(starts_ptr + token + 1) - begin).to(tl.int32)
    else:
        begin = token * indices_stride
        count = tl.minimum(tl.load(starts_ptr + token), width)
    slots_ptr = indices_ptr + begin

    q_row_ptr = tl.multiple_of(q_ptr + token * q_stride_token + head.to(tl.int64) * q_stride_head, ALIGN)
    q = tl.load(q_row_ptr[:, None] + dim[None, :], mask=(head < heads)[:, None], other=0.0)
    # the sink is a score without a value: the running maximum and sum start with it
    sink = tl.load(sink_ptr + head, mask=(head < heads) & (has_sink != 0), other=-float("inf"))
    sink *= 1.4426950408889634
    top = tl.maximum(sink, -1e30)
    total = tl.exp2(sink - top)
    acc = tl.zeros((BLOCK_H, 512), tl.float32)

    slot = tl.load(slots_ptr + row, mask=row < count, other=-1)
    for first in range(0, count, BLOCK_N):
        valid = (slot >= 0) & (slot < kv_rows)
        kv_row_ptr = tl.multiple_of(kv_ptr + slot.to(tl.int64) * kv_stride, ALIGN)
        kv = tl.load(kv_row_ptr[:, None] + dim[None, :], mask=valid[:, None], other=0.0)
        following = first + BLOCK_N + row
        slot = tl.load(slots_ptr + following, mask=following < count, other=-1)

        scores = tl.dot(q, tl.trans(kv)) * scale
        scores = tl.where(valid[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        total = total * fade + tl.sum(p, axis=1)
        acc = tl.dot(p.to(tl.bfloat16), kv, acc * fade[:, None])
        top = higher

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_row_ptr = tl.multiple_of(
        out_ptr + token * out_stride_token + head.to(tl.int64) * out_stride_head, ALIGN
    )
    tl.store(out_row_ptr[:, None] + dim[None, :], acc.to(tl.bfloat16), mask=(head < heads)[:, None])


def _variant(name: str, heads: int, rows: int, align: int, num_warps: int, num_stages: int) -> Variant:
    return Variant(
        name=name,
        kernel=_sparse_prefill_kernel,
        signature=_POINTERS
        | dict.fromkeys(_STRIDES, "i64")
        | dict.fromkeys(_SIZES, "i32")
        | {"scale": "fp32"},
        constexprs={"BLOCK_H": heads, "BLOCK_N": rows, "ALIGN": align},
        num_warps=num_warps,
        num_stages=num_stages,
        expects_mma=True,
    )


SMALL = _variant("16x16", 16, 16, 8, 4, 2)
NARROW = _variant("16x16-narrow", 16, 16, 1, 4, 1)


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in (SMALL, NARROW) if arch in variant.archs)


def pick(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> Variant:
    """The variant for these tensors' addresses and strides."""
    addresses = q.data_ptr() | kv.data_ptr() | out.data_ptr()
    strides = q.stride(0) | q.stride(1) | kv.stride(0) | out.stride(0) | out.stride(1)
    return SMALL if (addresses | 2 * strides) % 16 == 0 else NARROW


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
    """Launches the kernel on checked arguments: a program per token and block of heads, `starts` is indptr or lengths."""
    variant = pick(q, kv, out)
    tokens, heads = q.shape[:2]
    _sparse_prefill_kernel[(tokens * -(-heads // variant.constexprs["BLOCK_H"]),)](
        q,
        kv,
        out,
        # never read without a sink, but its type is part of the kernel's
        starts.view(torch.float32) if sink is None else sink,
        indices,
        starts,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        out.stride(0),
        out.stride(1),
        indices.stride(0),
        heads,
        kv.shape[0],
        indices.shape[-1],
        int(ragged),
        int(sink is not None),
        scale * math.log2(math.e),
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
