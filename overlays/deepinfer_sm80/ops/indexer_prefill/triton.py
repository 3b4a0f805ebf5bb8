"""The prefill logits kernel, its launch, and the table of its variants."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import gate
from ..indexer.decode import plane, score
from ..spec import Variant

_POINTERS = {"q_ptr": "*i32", "k_ptr": "*i32", "k_scale_ptr": "*fp32", "weights_ptr": "*fp32"}
_POINTERS |= {"ks_ptr": "*i32", "ke_ptr": "*i32", "out_ptr": "*fp32"}
_STRIDES = ("q_stride_row", "q_stride_head", "k_stride", "weights_stride", "out_stride")
_SIZES = ("rows", "keys", "width", "splits", "compressed")


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES], do_not_specialize_on_alignment=list(_POINTERS))
def _indexer_prefill_kernel(
    q_ptr,
    k_ptr,
    k_scale_ptr,
    weights_ptr,
    ks_ptr,
    ke_ptr,
    out_ptr,
    q_stride_row: tl.int64,
    q_stride_head: tl.int64,
    k_stride: tl.int64,
    weights_stride: tl.int64,
    out_stride: tl.int64,
    rows: tl.int32,
    keys: tl.int32,
    width: tl.int32,
    splits: tl.int32,
    compressed: tl.int32,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    LOAD_BYTES: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < rows
    begin = tl.maximum(tl.load(ks_ptr + token, mask=live, other=0), 0)
    end = tl.minimum(tl.load(ke_ptr + token, mask=live, other=0), keys)
    # column 0 is this key
    origin = tl.where(compressed != 0, begin, 0)
    end = tl.minimum(end.to(tl.int64), origin.to(tl.int64) + width).to(tl.int32)
    last = tl.max(tl.where(end > begin, end, 0))
    # at most `last`, so that no row with keys means no keys
    first = tl.min(tl.where(end > begin, begin, last))

    # 16 rows of every token, then the other 16: the rows that one warp's dot holds are one token's heads
    row = tl.arange(0, 32 * TOKENS)
    head = row // (16 * TOKENS) * 16 + row % 16
    row_token = tl.program_id(0) * TOKENS + row // 16 % TOKENS
    row_live = row_token < rows
    word = tl.arange(0, 32)
    q_row_ptr = q_ptr + row_token.to(tl.int64) * q_stride_row + head * q_stride_head
    q_row_ptr = tl.multiple_of(q_row_ptr, LOAD_BYTES)
    q = tl.load(q_row_ptr[:, None] + word[None, :], mask=row_live[:, None], other=0)
    weight = tl.load(weights_ptr + row_token.to(tl.int64) * weights_stride + head, mask=row_live, other=0.0)
    q0, q1, q2, q3 = plane(q, 0), plane(q, 1), plane(q, 2), plane(q, 3)

    out_row_ptr = out_ptr + token.to(tl.int64) * out_stride - origin
    step = splits * KEYS
    key0 = first + tl.program_id(1) * KEYS
    k, scale = _load_keys(k_ptr, k_scale_ptr, k_stride, key0 + tl.arange(0, KEYS), last, LOAD_BYTES)
    for start in range(key0, last, step):
        key = start + tl.arange(0, KEYS)
        k0, k1, k2, k3 = plane(k, 0), plane(k, 1), plane(k, 2), plane(k, 3)
        k_scale = scale
        # the next tile is on its way while this one is multiplied
        k, scale = _load_keys(k_ptr, k_scale_ptr, k_stride, key + step, last, LOAD_BYTES)
        result = score(q0, q1, q2, q3, k0, k1, k2, k3, k_scale, weight, TOKENS, KEYS)
        wanted = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        tl.store(out_row_ptr[:, None] + key[None, :], result, mask=wanted)


@triton.jit
def _load_keys(k_ptr, k_scale_ptr, k_stride, key, last, LOAD_BYTES: tl.constexpr):
    valid = key < last
    k_row_ptr = tl.multiple_of(k_ptr + key.to(tl.int64) * k_stride, LOAD_BYTES)
    k = tl.load(k_row_ptr[:, None] + tl.arange(0, 32)[None, :], mask=valid[:, None], other=0)
    return k, tl.load(k_scale_ptr + key, mask=valid, other=0.0)


# A warp per token, 40 KB. Twice the tokens in 72 KB took as long at 8,192 keys and 2.7 % less at 65,536 (sm80 code on an
# H200, 2,048 tokens): less than what a larger variant must gain.
VARIANT = Variant(
    name="4x32",
    kernel=_indexer_prefill_kernel,
    signature=_POINTERS | dict.fromkeys(_STRIDES, "i64") | dict.fromkeys(_SIZES, "i32"),
    constexprs={"TOKENS": 4, "KEYS": 32, "LOAD_BYTES": 16},
    num_warps=4,
    # the kernel fetches ahead itself: Triton's pipelining would have every warp decode every key
    num_stages=1,
    expects_mma=True,
)

# programs per SM that the grid is made for, and the fewest tiles of keys that one is worth
PROGRAMS_PER_SM = 16
TILES_PER_PROGRAM = 32


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    return (VARIANT,)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor,
    compressed: bool,
) -> None:
    """Launches the kernel on checked arguments (`q` and `k` as int32 words); nothing is read from the GPU."""
    tokens, keys = VARIANT.constexprs["TOKENS"], VARIANT.constexprs["KEYS"]
    programs = -(-q.shape[0] // tokens)
    wanted = -(-PROGRAMS_PER_SM * _sm_count() // programs)
    splits = max(1, min(wanted, out.shape[1] // (keys * TILES_PER_PROGRAM)))
    _indexer_prefill_kernel[(programs, splits)](
        q,
        k,
        k_scale,
        weights,
        ks,
        ke,
        out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        weights.stride(0),
        out.stride(0),
        q.shape[0],
        k.shape[0],
        out.shape[1],
        splits,
        int(compressed),
        **VARIANT.constexprs,
        num_warps=VARIANT.num_warps,
        num_stages=VARIANT.num_stages,
    )


def _sm_count() -> int:
    device = gate.device()
    return device.sm_count if device else gate.SM_COUNTS["sm80"]
