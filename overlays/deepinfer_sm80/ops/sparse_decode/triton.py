"""The sparse decode kernels, their launch, and the table of their variants."""

# mypy: disable-error-code="assignment,misc"
# (tuples that grow in unrolled loops are tuples of one length to it)
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ... import gate
from ..spec import Variant

# a maximum below every score; finite, so that no difference of maxima is NaN
_LOWEST = tl.constexpr(-3.0e38)
_LOG2E = tl.constexpr(1.4426950408889634)
_REBIAS = tl.constexpr(2.0**120)

_POINTERS = {"q_ptr": "*bf16", "out_ptr": "*bf16", "part_ptr": "*fp32", "stats_ptr": "*fp32"}
for _name in ("swa", "extra"):
    _POINTERS |= {f"{_name}_ptr": "*u8", f"{_name}_indices_ptr": "*i32", f"{_name}_indptr_ptr": "*i32"}
_POINTERS |= {"sink_ptr": "*fp32", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32"}
_STRIDES = (
    "q_stride_token",
    "q_stride_head",
    "out_stride_token",
    "out_stride_head",
    "swa_stride",
    "extra_stride",
    "swa_inverse",
    "extra_inverse",
    "cos_sin_stride",
)
_SIZES = (
    "swa_rows",
    "extra_rows",
    "swa_block",
    "extra_block",
    "given",
    "swa_shift",
    "extra_shift",
    "heads",
    "splits",
)
_MERGE_POINTERS = ("out_ptr", "part_ptr", "stats_ptr", "sink_ptr", "positions_ptr", "cos_sin_ptr")
_MERGE_STRIDES = ("out_stride_token", "out_stride_head", "cos_sin_stride")
_MERGE_SIZES = ("given", "heads", "splits")
# bits of `given`: which of the optional arguments there are
_EXTRA = tl.constexpr(1)
_SINK = tl.constexpr(2)
_POSITIONS = tl.constexpr(4)


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES, "scale"], do_not_specialize_on_alignment=list(_POINTERS))
def _attend_kernel(
    q_ptr,
    out_ptr,
    part_ptr,
    stats_ptr,
    swa_ptr,
    swa_indices_ptr,
    swa_indptr_ptr,
    extra_ptr,
    extra_indices_ptr,
    extra_indptr_ptr,
    sink_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    swa_stride: tl.int64,
    extra_stride: tl.int64,
    swa_inverse: tl.int64,
    extra_inverse: tl.int64,
    cos_sin_stride: tl.int64,
    swa_rows: tl.int32,
    extra_rows: tl.int32,
    swa_block: tl.int32,
    extra_block: tl.int32,
    given: tl.int32,
    swa_shift: tl.int32,
    extra_shift: tl.int32,
    heads: tl.int32,
    splits: tl.int32,
    scale: tl.float32,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
):
    split = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    used = head < heads
    row = tl.arange(0, BLOCK_K)
    column = tl.arange(0, 64)

    swa_begin = tl.load(swa_indptr_ptr + token)
    swa_end = tl.load(swa_indptr_ptr + token + 1)
    extra_begin = tl.load(extra_indptr_ptr + token, mask=(given & _EXTRA) != 0, other=0)
    extra_end = tl.load(extra_indptr_ptr + token + 1, mask=(given & _EXTRA) != 0, other=0)
    # a tile has rows of one cache only; a split is a run of tiles
    swa_tiles = tl.cdiv(swa_end - swa_begin, BLOCK_K)
    tiles = swa_tiles + tl.cdiv(extra_end - extra_begin, BLOCK_K)
    first = tiles * split // splits
    last = tiles * (split + 1) // splits

    # q and the accumulators come in slices of 64 columns: 7 groups of codes, each with its scale, and the tail
    q_row = tl.multiple_of(q_ptr + token * q_stride_token + head * q_stride_head, ALIGN)
    q = ()
    acc = ()
    for part in tl.static_range(8):
        acc += (tl.zeros((BLOCK_H, 64), tl.float32),)
        if part < 7:
            q += (tl.load(q_row[:, None] + (part * 64 + column)[None, :], mask=used[:, None], other=0.0),)
    largest = tl.full((BLOCK_H,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)

    swa = (
        swa_ptr,
        swa_stride,
        swa_inverse,
        swa_block,
        swa_rows,
        swa_indices_ptr,
        swa_begin,
        swa_end,
        swa_shift,
    )
    extra = (
        extra_ptr,
        extra_stride,
        extra_inverse,
        extra_block,
        extra_rows,
        extra_indices_ptr,
        extra_begin - swa_tiles * BLOCK_K,
        extra_end,
        extra_shift,
    )
    slot = _load_slots(swa, extra, first, swa_tiles, last, row, BLOCK_K)
    for tile in range(first, last):
        valid, data_ptr, scales = _locate(swa, extra, tile < swa_tiles, slot, ALIGN)
        # all of them before the first is used, and the next tile's slots behind them
        words = ()
        for part in tl.static_range(8):
            words += (_load_words(data_ptr, valid, part, ALIGN),)
        slot = _load_slots(swa, extra, tile + 1, swa_tiles, last, row, BLOCK_K)
        # the weights lie in shared memory where the tail of q lay, so it is read again for each tile: without that the
        # small variant is 1 KiB too large for 48 KiB, and the large one for sm86. min() is 0; it keeps the load in here
        q_tail_row = tl.multiple_of(q_row + tl.minimum(tile, 0) * 8, ALIGN)
        q_tail = tl.load(q_tail_row[:, None] + (448 + column)[None, :], mask=used[:, None], other=0.0)
        kv = ()
        for part in tl.static_range(7):
            kv += (_decode(words[part], (scales >> (8 * part)).to(tl.int32) & 255, BLOCK_K),)
        kv += (_scrub(words[7], BLOCK_K),)

        # two chains of sums: a product waits for the one before it
        even_score = tl.dot(q[0], tl.trans(kv[0]))
        odd_score = tl.dot(q[1], tl.trans(kv[1]))
        for part in tl.static_range(2, 7, 2):
            even_score = tl.dot(q[part], tl.trans(kv[part]), even_score)
        for part in tl.static_range(3, 7, 2):
            odd_score = tl.dot(q[part], tl.trans(kv[part]), odd_score)
        score = even_score + tl.dot(q_tail, tl.trans(kv[7]), odd_score)
        score = tl.where(valid[None, :], score * (scale * _LOG2E), -float("inf"))
        top = tl.maximum(largest, tl.max(score, 1))
        shrink = tl.exp2(largest - top)
        weight = tl.exp2(score - top[:, None])
        largest = top
        total = total * shrink + tl.sum(weight, 1)
        weight = weight.to(tl.bfloat16)
        new_acc = ()
        for part in tl.static_range(8):
            new_acc += (tl.dot(weight, kv[part], acc[part] * shrink[:, None]),)
        acc = new_acc

    if splits == 1:
        sink = tl.load(sink_ptr + head, mask=used & ((given & _SINK) != 0), other=-float("inf")) * _LOG2E
        factor = _share(largest, total, sink)[:, None]
        out_row = tl.multiple_of(out_ptr + token * out_stride_token + head * out_stride_head, ALIGN)
        out_ptrs = out_row[:, None] + column[None, :]
        for part in tl.static_range(7):
            value = acc[part] * factor
            tl.store(out_ptrs + part * 64, value.to(tl.bfloat16), mask=used[:, None])
        pair = tl.arange(0, 32)
        rotated = (given & _POSITIONS) != 0
        cos, sin = _load_angle(positions_ptr, cos_sin_ptr, cos_sin_stride, token, pair, rotated)
        even, odd = tl.split(tl.reshape(acc[7] * factor, (BLOCK_H, 32, 2)))
        value = _turn_back(even, odd, cos[None, :], sin[None, :])
        value = tl.reshape(value, (BLOCK_H, 64))
        tl.store(out_ptrs + 448, value.to(tl.bfloat16), mask=used[:, None])
    else:
        at = (token * splits + split) * heads + head
        tl.store(stats_ptr + 2 * at, largest, mask=used)
        tl.store(stats_ptr + 2 * at + 1, total, mask=used)
        # a split without rows leaves its part as it is; the merge sees that its total is 0
        stored = (used & (first < last))[:, None]
        part_ptrs = tl.multiple_of(part_ptr + at * 512, 16)[:, None] + column[None, :]
        for part in tl.static_range(8):
            tl.store(part_ptrs + part * 64, acc[part], mask=stored)


@triton.jit(
    do_not_specialize=[*_MERGE_STRIDES, *_MERGE_SIZES], do_not_specialize_on_alignment=list(_MERGE_POINTERS)
)
def _merge_kernel(
    out_ptr,
    part_ptr,
    stats_ptr,
    sink_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    cos_sin_stride: tl.int64,
    given: tl.int32,
    heads: tl.int32,
    splits: tl.int32,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, 512)
    start = token * splits * heads + head
    split = tl.arange(0, MAX_SPLITS)
    stats_ptrs = stats_ptr + 2 * (start + split * heads)
    largest = tl.load(stats_ptrs, mask=split < splits, other=_LOWEST)
    total = tl.load(stats_ptrs + 1, mask=split < splits, other=0.0)
    top = tl.max(largest, 0)
    total = tl.sum(total * tl.exp2(largest - top), 0)
    sink = tl.load(sink_ptr + head, mask=(given & _SINK) != 0, other=-float("inf")) * _LOG2E
    factor = _share(top, total, sink)

    acc = tl.zeros((512,), tl.float32)
    for begin in range(0, splits, CHUNK):
        some = begin + tl.arange(0, CHUNK)
        some_ptrs = stats_ptr + 2 * (start + some * heads)
        filled = tl.load(some_ptrs + 1, mask=some < splits, other=0.0) > 0.0
        weight = tl.exp2(tl.load(some_ptrs, mask=filled, other=_LOWEST) - top) * factor
        part_ptrs = tl.multiple_of(part_ptr + (start + some * heads) * 512, 16)[:, None] + column[None, :]
        acc += tl.sum(tl.load(part_ptrs, mask=filled[:, None], other=0.0) * weight[:, None], 0)

    pair = tl.arange(0, 256) - 224
    rotated = (pair >= 0) & ((given & _POSITIONS) != 0)
    cos, sin = _load_angle(positions_ptr, cos_sin_ptr, cos_sin_stride, token, pair, rotated)
    even, odd = tl.split(tl.reshape(acc, (256, 2)))
    acc = tl.reshape(_turn_back(even, odd, cos, sin), (512,))
    tl.store(out_ptr + token * out_stride_token + head * out_stride_head + column, acc.to(tl.bfloat16))


@triton.jit
def _share(largest, total, sink):
    """What the sum of rows is multiplied with: 1 over the whole softmax, sink included; 0 for a head without rows."""
    top = tl.maximum(largest, sink)
    whole = total * tl.exp2(largest - top) + tl.exp2(sink - top)
    return tl.where(total > 0.0, tl.exp2(largest - top) / whole, 0.0)


@triton.jit
def _load_angle(positions_ptr, cos_sin_ptr, stride, token, pair, mask):
    """Cosines and sines of pairs of columns; those of no rotation where `mask` is not set."""
    position = tl.load(positions_ptr + token + pair * 0, mask=mask, other=0)
    ptrs = cos_sin_ptr + position * stride + pair
    return tl.load(ptrs, mask=mask, other=1.0), tl.load(ptrs + 32, mask=mask, other=0.0)


@triton.jit
def _turn_back(even, odd, cos, sin):
    return tl.join(even * cos + odd * sin, odd * cos - even * sin)


@triton.jit
def _load_slots(swa, extra, tile, swa_tiles, last, row, BLOCK_K: tl.constexpr):
    """The slots of a tile; -1 after the list's end and in tiles from `last` on."""
    is_swa = tile < swa_tiles
    at = tl.where(is_swa, swa[6], extra[6]) + tile * BLOCK_K + row
    inside = (at < tl.where(is_swa, swa[7], extra[7])) & (tile < last)
    return tl.load(tl.where(is_swa, swa[5], extra[5]) + at, mask=inside, other=-1)


@triton.jit
def _locate(swa, extra, is_swa, slot, ALIGN: tl.constexpr):
    """Which slots are valid, where their records begin, and the 8 bytes with their scales as int64."""
    block = tl.where(is_swa, swa[3], extra[3])
    valid = (slot >= 0) & (slot < tl.where(is_swa, swa[4], extra[4]))
    slot = tl.where(valid, slot, 0)
    # divided by the block size
    page = (slot.to(tl.int64) * tl.where(is_swa, swa[2], extra[2])) >> tl.where(is_swa, swa[8], extra[8])
    page_row = slot - page.to(tl.int32) * block
    page_ptr = tl.where(is_swa, swa[0], extra[0]) + page * tl.where(is_swa, swa[1], extra[1])
    scale_ptr = page_ptr + (block * 576 + page_row * 8)
    if ALIGN == 16:
        scales = tl.load(scale_ptr.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    else:
        scales = tl.load(scale_ptr, mask=valid, other=0).to(tl.int64)
        for byte in tl.static_range(1, 8):
            scales |= tl.load(scale_ptr + byte, mask=valid, other=0).to(tl.int64) << (8 * byte)
    return valid, tl.multiple_of(page_ptr + page_row * 576, ALIGN), scales


@triton.jit
def _load_words(data_ptr, valid, part: tl.constexpr, ALIGN: tl.constexpr):
    """One of 7 groups of 16 words with codes, or the 32 of the tail, as `[rows, words, 1]`: they can be widened where they
    lie, for the values of a word follow each other.
    """
    index = part * 16 + tl.arange(0, 16 if part < 7 else 32)
    if ALIGN == 16:
        ptrs = (data_ptr.to(tl.pointer_type(tl.int32))[:, None] + index[None, :])[:, :, None]
        return tl.load(ptrs, mask=valid[:, None, None], other=0)
    ptrs = (data_ptr[:, None] + 4 * index[None, :])[:, :, None]
    words = tl.load(ptrs, mask=valid[:, None, None], other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        words |= tl.load(ptrs + byte, mask=valid[:, None, None], other=0).to(tl.int32) << (8 * byte)
    return words


@triton.jit
def _decode(words, scale, BLOCK_K: tl.constexpr):
    """The 64 values under one scale as bfloat16 `[rows, 64]`, NaN as 0.

    Not by `numerics.e4m3`: widening by `tl.join`, as gather does, makes Triton choose an operand layout that it cannot
    load from shared memory by ldmatrix, and decode once for each product.
    """
    code = tl.reshape(tl.broadcast_to(words, (BLOCK_K, 16, 4)), (BLOCK_K, 64))
    code = code << (24 - 8 * (tl.arange(0, 64) % 4))[None, :]
    # a float32 that is 2^-120 of the value, for subnormal codes too; 480 is what the NaN codes would have been
    value = ((code >> 4) & -0x78100000).to(tl.float32, bitcast=True) * _REBIAS
    value = tl.where(tl.abs(value) > 448.0, 0.0, value)
    # code 0 is 2^-127, a subnormal; under NaN everything is 0
    factor = tl.where(scale == 0, 0x00400000, scale << 23)
    factor = tl.where(scale == 255, 0, factor).to(tl.float32, bitcast=True)
    return (value * factor[:, None]).to(tl.bfloat16)


@triton.jit
def _scrub(words, BLOCK_K: tl.constexpr):
    """The 64 values of the tail, bfloat16 `[rows, 64]`, NaN as 0."""
    bits = tl.reshape(tl.broadcast_to(words, (BLOCK_K, 32, 2)), (BLOCK_K, 64))
    bits = bits >> (16 * (tl.arange(0, 64) % 2))[None, :]
    bits = tl.where((bits & 0x7FFF) > 0x7F80, 0, bits)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


def _variant(heads: int, rows: int, num_warps: int, *, align: int = 16, measured: str = "") -> Variant:
    return Variant(
        name=f"{heads}x{rows}" + ("" if align == 16 else "-any"),
        kernel=_attend_kernel,
        signature=_POINTERS
        | dict.fromkeys(_STRIDES, "i64")
        | dict.fromkeys(_SIZES, "i32")
        | {"scale": "fp32"},
        constexprs={"BLOCK_H": heads, "BLOCK_K": rows, "ALIGN": align},
        num_warps=num_warps,
        num_stages=1,
        expects_mma=True,
        measured=measured,
    )


MAX_SPLITS = 64
MERGE = Variant(
    name="merge",
    kernel=_merge_kernel,
    signature={name: _POINTERS[name] for name in _MERGE_POINTERS}
    | dict.fromkeys(_MERGE_STRIDES, "i64")
    | dict.fromkeys(_MERGE_SIZES, "i32"),
    constexprs={"MAX_SPLITS": MAX_SPLITS, "CHUNK": 8},
    num_warps=4,
    num_stages=1,
)
# measured: microseconds on an H200, 128 + 512 rows, T tokens, H heads, sm80 code
ANY = _variant(16, 16, 4, align=1)
SMALL = _variant(
    16, 32, 4, measured="T=1: 13.0, 32x64 14.2; T=6: H=64 16.6 (15.5), H=32 14.2 (14.6); 16x16 at T=1: 19.3"
)
LARGE = _variant(
    32, 64, 8, measured="T=24: H=64 35.8, 16x32 41.1; H=32 21.0 (23.6); T=96: 110 (130), 62.0 (77.4)"
)
# variant → bytes of shared memory
SHARED_BYTES = {ANY.name: 49_152, SMALL.name: 49_152, LARGE.name: 98_304}
# variant → microseconds that a tile takes on its way through an SM, and that it takes from the SM's other tiles
TILE_COST = {ANY.name: (2.0, 1.2), SMALL.name: (2.6, 1.8), LARGE.name: (5.2, 5.2)}
# microseconds of the merge: to launch it, and for each KiB of partial results, written and read
MERGE_COST = (3.0, 0.00025)


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    limit = gate.SMEM_LIMITS[arch]
    return (*(one for one in (ANY, SMALL, LARGE) if SHARED_BYTES[one.name] <= limit), MERGE)


def pick(tokens: int, heads: int, widths: tuple[int, ...], aligned: bool) -> tuple[Variant, int]:
    """The variant for so many tokens and heads, and the number of splits; `widths`: rows per token that each list may have."""
    device = gate.device()
    limit = device.smem_limit if device else gate.SMEM_LIMITS["sm80"]
    sm_count = device.sm_count if device else gate.SM_COUNTS["sm80"]
    return _pick(tokens, heads, widths, aligned, sm_count, limit)


@lru_cache(4096)
def _pick(
    tokens: int, heads: int, widths: tuple[int, ...], aligned: bool, sm_count: int, limit: int
) -> tuple[Variant, int]:
    variant = SMALL if aligned else ANY
    # with fewer tiles than SMs the large variant leaves SMs idle that the small one uses
    large = tokens * _blocks(LARGE, heads) * _tiles(LARGE, widths) >= sm_count
    if aligned and large and heads > 16 and limit >= SHARED_BYTES[LARGE.name]:
        variant = LARGE
    return variant, choose_splits(variant, tokens, heads, widths, sm_count)


def choose_splits(variant: Variant, tokens: int, heads: int, widths: tuple[int, ...], sm_count: int) -> int:
    """Splits per token: the number with the shortest modelled time, of those that give no split more tiles than it must."""
    tiles = max(1, _tiles(variant, widths))
    blocks = tokens * _blocks(variant, heads)
    alone, shared = TILE_COST[variant.name]
    found: dict[int, float] = {}
    for per_split in range(-(-tiles // MAX_SPLITS), tiles + 1):
        splits = -(-tiles // per_split)
        on_one_sm = -(-blocks * splits // sm_count) * per_split
        merge = MERGE_COST[0] + MERGE_COST[1] * 4 * tokens * heads * splits if splits > 1 else 0.0
        found.setdefault(splits, max(alone * per_split, shared * on_one_sm) + merge)
    return min(found, key=lambda splits: found[splits])


def _blocks(variant: Variant, heads: int) -> int:
    return -(-heads // int(variant.constexprs["BLOCK_H"]))


def _tiles(variant: Variant, widths: tuple[int, ...]) -> int:
    return sum(-(-width // int(variant.constexprs["BLOCK_K"])) for width in widths)


def launch(
    q: torch.Tensor,
    out: torch.Tensor,
    lists: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    scale: float,
    sink: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
) -> None:
    """Launches the kernel on checked arguments, and the merge if there are splits."""
    tokens, heads = q.shape[:2]
    address = 0
    for cache, _indices, _indptr in lists:
        address |= cache.data_ptr() | cache.stride(0)
    for rows in (q, out):
        address |= rows.data_ptr() | 2 * (rows.stride(0) | rows.stride(1))
    # vLLM sizes a list for its tokens times the widest row: what a token has is on the device only
    widths = tuple(-(-indices.shape[0] // tokens) for _cache, indices, _indptr in lists)
    variant, splits = pick(tokens, heads, widths, address % 16 == 0)
    run(variant, splits, q, out, lists, scale, sink, positions, cos_sin_cache)


def run(
    variant: Variant,
    splits: int,
    q: torch.Tensor,
    out: torch.Tensor,
    lists: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    scale: float,
    sink: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
) -> None:
    """As `launch`, with this variant and so many splits."""
    tokens, heads = q.shape[:2]
    (swa, *swa_list), (extra, *extra_list) = lists[0], lists[-1]
    # scratch, and where there is nothing to read, something to point at
    count = tokens * splits * heads if splits > 1 else 0
    part = torch.empty(count * 514, dtype=torch.float32, device=q.device)
    stats = part[count * 512 :]
    sinks = part if sink is None else sink
    angles = part if cos_sin_cache is None else cos_sin_cache
    places = part.view(torch.int64) if positions is None else positions
    stride = 0 if cos_sin_cache is None else cos_sin_cache.stride(0)
    swa_inverse, swa_shift = inverse(swa.shape[1])
    extra_inverse, extra_shift = inverse(extra.shape[1])
    given = len(lists) - 1 + 2 * (sink is not None) + 4 * (positions is not None)
    _attend_kernel[(_blocks(variant, heads), splits, tokens)](
        q,
        out,
        part,
        stats,
        swa,
        *swa_list,
        extra,
        *extra_list,
        sinks,
        places,
        angles,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        swa.stride(0),
        extra.stride(0),
        swa_inverse,
        extra_inverse,
        stride,
        swa.shape[0] * swa.shape[1],
        extra.shape[0] * extra.shape[1],
        swa.shape[1],
        extra.shape[1],
        given,
        swa_shift,
        extra_shift,
        heads,
        splits,
        scale,
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
    if splits > 1:
        _merge_kernel[(heads, tokens)](
            out,
            part,
            stats,
            sinks,
            places,
            angles,
            out.stride(0),
            out.stride(1),
            stride,
            given,
            heads,
            splits,
            **MERGE.constexprs,
            num_warps=MERGE.num_warps,
            num_stages=MERGE.num_stages,
        )


@lru_cache(64)
def inverse(block_size: int) -> tuple[int, int]:
    """A factor and a shift: slot // block_size is `slot * factor >> shift` for every slot below 2^31, without overflow."""
    shift = 31 + (block_size - 1).bit_length()
    return -(-(1 << shift) // block_size), shift
