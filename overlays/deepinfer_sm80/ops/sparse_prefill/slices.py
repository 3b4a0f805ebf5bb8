"""The TileLang sparse prefill kernel: a warp owns columns of the KV rows, in both products.

A CTA of W warps serves `8 * W` heads of one token, in tiles of 32 rows. Warp w gathers `512 / W` columns of every row
into its slice of shared memory, reads them for the scores and for the values, and refills them, all without waiting
for another warp:

1. scores: the warp multiplies its columns of q, which stay in registers, with its slice: sums over its columns, for
   all heads. It keeps those of its own 8 heads and sends the others to their warps through shared memory; barrier.
2. softmax: the warp adds up the scores of its 8 heads and writes their weights, in bfloat16, to shared memory; barrier.
3. values: the warp multiplies the weights of all heads with its slice.

Scores stay in the layout of the `m16n8k16` accumulator: of 8 heads, lane l has head `l // 4`, and of every 8 rows the
rows `l % 4 * 2` and `l % 4 * 2 + 1`. A slice is cut into blocks of 64 columns; the 16-byte chunks of a row in it stand
at `chunk ^ row % 8`, so that neither copies nor matrix loads have bank conflicts.
"""

# TileLang reads tensor types where Python has annotations
# mypy: disable-error-code="valid-type"

import math
from typing import Any

import tilelang.language as T

HEAD_DIM = 512
ROWS = 32  # of a tile: one per lane
LOG2_E = math.log2(math.e)
# instead of a slot that names no row: its copies read nothing, but their address must be a multiple of 16 bytes, and the
# stride of a single row may be 1
NO_ROW = -8
# below every score, and finite: the difference of two such maxima is 0
LOWEST = -1e30
# Weights are taken relative to a maximum that is replaced only once a score exceeds it by this (base 2): sums grow to
# 2^8 times their usual size, which floating point does not notice, and accumulators are rarely rescaled.
SLACK = 8.0


def _block(slice_offset: Any, block: int) -> Any:
    """Where 64 columns of a slice start."""
    return slice_offset + block * ROWS * 64


def _mma(a: Any, a_at: int, b: Any, b_at: Any, c: Any, c_at: Any) -> Any:
    return T.ptx_mma(
        "float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32",
        a.data, a_at, b.data, b_at, c.data, c_at, T.bool(False),
    )  # fmt: skip


@T.macro
def _load_slot(tile, indices, slot, begin, count, lane):
    """The slot of this lane's row of `tile`; -1 past the end of the list."""
    at = tile * ROWS + lane
    slot[0] = T.if_then_else(at < count, indices[begin + at], -1)


@T.macro
def _check_slot(tile, kv_rows, masks, slot, warp, lane):
    """Sets `slot` to NO_ROW and its score's mask to -inf where there is no such row."""
    valid = (slot[0] >= 0) & (slot[0] < kv_rows)
    if warp == 0:
        masks[tile % 2, lane] = T.if_then_else(valid, 0.0, -T.infinity("float32"))
    slot[0] = T.if_then_else(valid, slot[0], NO_ROW)


@T.macro
def _gather(half, holes, kv, slices, offset, slot, blocks, warp, lane):
    """Starts copying this warp's columns of 16 rows. With `holes`, rows that are none become zeros: 0 * NaN is NaN."""
    for step in T.unroll(ROWS // 8):
        row = half * 16 + step * 4 + lane // 8
        named = T.shfl_sync(slot[0], row)
        for block in T.unroll(blocks):
            at = _block(offset, block) + row * 64 + ((lane % 8) ^ (row % 8)) * 8
            column = (warp * blocks + block) * 64 + lane % 8 * 8
            if holes:
                T.ptx_cp_async(
                    T.access_ptr(slices[at], "w", extent=8),
                    T.access_ptr(kv[named, column], "r", extent=8),
                    8,
                    predicate=named >= 0,
                )
            else:
                T.ptx_cp_async(
                    T.access_ptr(slices[at], "w", extent=8), T.access_ptr(kv[named, column], "r", extent=8), 8
                )


@T.macro
def _gather_half(half, more, kv, slices, offset, slot, blocks, warp, lane):
    """`_gather` where there is `more` to copy, as a group of its own in any case."""
    if more:
        if T.any_sync(T.Cast("int32", slot[0] < 0)) != 0:
            _gather(half, True, kv, slices, offset, slot, blocks, warp, lane)
        else:
            _gather(half, False, kv, slices, offset, slot, blocks, warp, lane)
    T.ptx_commit_group()


@T.macro
def _load_q(q, queries, token, head, heads, warp, warps, lane):
    """This warp's columns of q as operands A, blocks of 8 heads in turn from its own on.

    Heads past the last are read as the last, and never written.
    """
    columns = HEAD_DIM // warps
    for k in T.unroll(columns // 16):
        for m in T.unroll(warps // 2):
            for r in T.unroll(4):
                for v in T.vectorized(2):
                    queries[((k * (warps // 2) + m) * 4 + r) * 2 + v] = q[
                        token,
                        T.min(head + (warp + m * 2 + r % 2) % warps * 8 + lane // 4, heads - 1),
                        warp * columns + k * 16 + r // 2 * 8 + lane % 4 * 2 + v,
                    ]


@T.macro
def _scores(half, queries, slices, key, own, sums, b, partials, warp, warps, lane):
    """Scores of 16 rows over this warp's columns: of its own heads into `own`, of the others' into their `partials`."""
    blocks, height = 8 // warps, warps // 2
    for i in T.unroll(height * 8):
        sums[i] = 0.0
    for k in T.unroll(blocks * 4):
        T.ptx_ldmatrix(
            T.bool(False),
            4,
            T.access_ptr(slices[(key[0] ^ (k % 4 * 16)) + (k // 4 * ROWS + half * 16) * 64], "r", extent=8),
            T.access_ptr(b[0], "w", extent=8),
        )
        for m in T.unroll(height):
            for n in T.unroll(2):
                _mma(queries, (k * height + m) * 8, b, n * 4, sums, (m * 2 + n) * 4)
    for n in T.unroll(2):
        for v in T.unroll(2):
            own[(half * 2 + n) * 2 + v] = sums[n * 4 + v]
        for other in T.unroll(warps - 1):
            for v in T.vectorized(2):
                partials[(warp + other + 1) % warps * (warps - 1) + other, half * 2 + n, lane * 2 + v] = sums[
                    ((other + 1) // 2 * 2 + n) * 4 + (other + 1) % 2 * 2 + v
                ]


@T.macro
def _softmax(tile, own, pair, partials, masks, weights, rescale, top, total, factor, warp, warps, lane):
    """Weights of this warp's heads, relative to `top`; `total` is their sum over this lane's rows."""
    highest = T.alloc_var("float32")
    fade = T.alloc_var("float32")
    highest = LOWEST
    for n in T.unroll(ROWS // 8):
        for other in T.unroll(warps - 1):
            for v in T.vectorized(2):
                pair[v] = partials[warp * (warps - 1) + other, n, lane * 2 + v]
            for v in T.unroll(2):
                own[n * 2 + v] += pair[v]
        for v in T.vectorized(2):
            pair[v] = masks[tile % 2, n * 8 + lane % 4 * 2 + v]
        for v in T.unroll(2):
            own[n * 2 + v] = own[n * 2 + v] * factor + pair[v]
            highest = T.max(highest, own[n * 2 + v])
    # the four lanes of a head
    highest = T.max(highest, T.shfl_xor(highest, 1))
    highest = T.max(highest, T.shfl_xor(highest, 2))
    highest = T.if_then_else(highest > top[0] + SLACK, highest, top[0])
    fade = T.exp2(top[0] - highest)
    if lane % 4 == 0:
        rescale[0, warp * 8 + lane // 4] = fade
    total[0] = total[0] * fade
    top[0] = highest
    for n in T.unroll(ROWS // 8):
        for v in T.unroll(2):
            own[n * 2 + v] = T.exp2(own[n * 2 + v] - highest)
            total[0] += own[n * 2 + v]
        for v in T.vectorized(2):
            weights[warp * 8 + lane // 4, n * 8 + lane % 4 * 2 + v] = T.Cast("bfloat16", own[n * 2 + v])


@T.macro
def _rescale(rescale, fades, sums, warps, lane):
    """Brings the sums so far to the new maxima, where there are any."""
    height, groups = warps // 2, 32 // warps
    for i in T.unroll(height * 2):
        fades[i] = rescale[0, i * 8 + lane // 4]
    for m in T.unroll(height):
        if T.any_sync(T.Cast("int32", (fades[m * 2] != 1.0) | (fades[m * 2 + 1] != 1.0))) != 0:
            for n in T.unroll(groups * 2):
                for r in T.unroll(4):
                    sums[(m * groups * 2 + n) * 4 + r] *= fades[m * 2 + r // 2]


@T.macro
def _values(half, slices, value, weights, sums, a, b, warps, lane):
    """Adds 16 weighted rows to this warp's columns of all heads."""
    height, groups = warps // 2, 32 // warps
    for m in T.unroll(height):
        T.ptx_ldmatrix(
            T.bool(False),
            4,
            T.access_ptr(weights[m * 16 + lane % 16, half * 16 + lane // 16 * 8], "r", extent=8),
            T.access_ptr(a[m * 8], "w", extent=8),
        )
    for n in T.unroll(groups):
        T.ptx_ldmatrix(
            T.bool(True),
            4,
            T.access_ptr(slices[(value[0] ^ (n % 4 * 16)) + (n // 4 * ROWS + half * 16) * 64], "r", extent=8),
            T.access_ptr(b[0], "w", extent=8),
        )
        for m in T.unroll(height):
            for h in T.unroll(2):
                _mma(a, m * 8, b, h * 4, sums, (m * groups * 2 + n * 2 + h) * 4)


@T.macro
def _finish(sink, has_sink, head, rescale, top, total, warp, lane):
    """One over the denominator of each of this warp's heads; 0 without a valid row."""
    share = T.alloc_var("float32")
    highest = T.alloc_var("float32")
    total[0] += T.shfl_xor(total[0], 1)
    total[0] += T.shfl_xor(total[0], 2)
    share = -T.infinity("float32")
    if has_sink != 0:
        share = sink[head] * LOG2_E
    highest = T.max(top[0], share)
    if lane % 4 == 0:
        rescale[1, warp * 8 + lane // 4] = T.if_then_else(
            total[0] > 0.0,
            T.exp2(top[0] - highest) / (total[0] * T.exp2(top[0] - highest) + T.exp2(share - highest)),
            0.0,
        )


@T.macro
def _store(out, sums, slices, offset, rescale, fades, token, head, heads, warp, warps, lane):
    """Writes this warp's columns of the output by way of its slice, which nobody reads any more, 16 bytes at a time."""
    height, groups, columns = warps // 2, 32 // warps, HEAD_DIM // warps
    for i in T.unroll(height * 2):
        fades[i] = rescale[1, i * 8 + lane // 4]
    # rows of the slice are now heads, with the same exchange of chunks
    T.sync_warp()
    for m in T.unroll(height):
        for r in T.unroll(2):
            for n in T.unroll(groups * 2):
                row = m * 16 + r * 8 + lane // 4
                for v in T.vectorized(2):
                    slices[
                        offset
                        + n // 8 * warps * 8 * 64
                        + row * 64
                        + ((n % 8) ^ (row % 8)) * 8
                        + lane % 4 * 2
                        + v
                    ] = T.Cast("bfloat16", sums[(m * groups * 2 + n) * 4 + r * 2 + v] * fades[m * 2 + r])
    T.sync_warp()
    for step in T.unroll(warps * 2):
        row = step * 4 + lane // 8
        if head + row < heads:
            for block in T.unroll(8 // warps):
                for v in T.vectorized(8):
                    out[token, head + row, warp * columns + block * 64 + lane % 8 * 8 + v] = slices[
                        offset + block * warps * 8 * 64 + row * 64 + ((lane % 8) ^ (row % 8)) * 8 + v
                    ]


def build(warps: int) -> Any:
    """The kernel for `8 * warps` heads per CTA as a TIR function.

    Its arguments are those of the op, checked; beside them, with `ragged` 0, `starts` are lengths, and the slots of
    token t start at `t * indices_stride` of at most `width`. Without `has_sink` the sink is not read.
    """
    tokens, heads, kv_rows = T.dynamic("tokens"), T.dynamic("heads"), T.dynamic("kv_rows")
    slots, starts_size, sink_size = (
        T.dynamic("slots", "int64"),
        T.dynamic("starts_size"),
        T.dynamic("sink_size"),
    )
    q_token, q_head, kv_row = T.dynamic("q_token"), T.dynamic("q_head"), T.dynamic("kv_row")
    out_token, out_head = T.dynamic("out_token"), T.dynamic("out_head")
    cta_heads, blocks, height, groups = 8 * warps, 8 // warps, warps // 2, 32 // warps

    @T.prim_func
    def sparse_prefill(
        q: T.StridedTensor((tokens, heads, HEAD_DIM), (q_token, q_head, 1), "bfloat16"),
        kv: T.StridedTensor((kv_rows, HEAD_DIM), (kv_row, 1), "bfloat16"),
        out: T.StridedTensor((tokens, heads, HEAD_DIM), (out_token, out_head, 1), "bfloat16"),
        sink: T.Tensor((sink_size,), "float32"),
        indices: T.Tensor((slots,), "int32"),
        starts: T.Tensor((starts_size,), "int32"),
        scale: T.float32,
        indices_stride: T.int64,
        width: T.int32,
        ragged: T.int32,
        has_sink: T.int32,
    ):
        with T.Kernel(tokens * T.ceildiv(heads, cta_heads), threads=32 * warps) as cta:
            slices = T.alloc_shared((ROWS * HEAD_DIM,), "bfloat16")
            partials = T.alloc_shared((warps * (warps - 1), ROWS // 8, 64), "float32")
            weights = T.alloc_shared((cta_heads, ROWS + 8), "bfloat16")
            masks = T.alloc_shared((2, ROWS), "float32")
            # fading of the tile, and 1 / denominator: one array, for TileLang lays arrays that are not alive together
            # over each other, and a warp may write the second while another still reads its slice
            rescale = T.alloc_shared((2, cta_heads), "float32")
            queries = T.alloc_local((blocks * 4 * height * 8,), "bfloat16")
            a = T.alloc_local((height * 8,), "bfloat16")
            b = T.alloc_local((8,), "bfloat16")
            sums = T.alloc_local((height * groups * 8,), "float32")
            scores = T.alloc_local((height * 8,), "float32")
            own = T.alloc_local((ROWS // 4,), "float32")
            pair = T.alloc_local((2,), "float32")
            fades = T.alloc_local((height * 2,), "float32")
            slot = T.alloc_local((1,), "int32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            key = T.alloc_local((1,), "int32")
            value = T.alloc_local((1,), "int32")
            T.assume(q_token % 8 == 0)
            T.assume(q_head % 8 == 0)
            T.assume(kv_row % 8 == 0)
            T.assume(out_token % 8 == 0)
            T.assume(out_head % 8 == 0)

            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            offset = warp * blocks * ROWS * 64
            # the CTAs of a token are neighbours: they read the same rows
            token = cta // T.ceildiv(heads, cta_heads)
            head = cta % T.ceildiv(heads, cta_heads) * cta_heads
            begin = T.if_then_else(ragged != 0, T.Cast("int64", starts[token]), token * indices_stride)
            count = T.if_then_else(
                ragged != 0,
                starts[T.min(token + 1, starts_size - 1)] - starts[token],
                T.min(starts[token], width),
            )
            tiles = T.ceildiv(count, ROWS)
            # where this lane reads in its slice: rows of operand B for the scores, its columns for the values
            key[0] = offset + (lane // 16 * 8 + lane % 8) * 64 + (lane // 8 % 2 ^ lane % 8) * 8
            value[0] = offset + lane % 16 * 64 + (lane // 16 ^ lane % 8) * 8

            _load_slot(0, indices, slot, begin, count, lane)
            _check_slot(0, kv_rows, masks, slot, warp, lane)
            for half in T.unroll(2):
                _gather_half(half, tiles > 0, kv, slices, offset, slot, blocks, warp, lane)
            _load_slot(1, indices, slot, begin, count, lane)
            _load_q(q, queries, token, head, heads, warp, warps, lane)
            for i in T.unroll(height * groups * 8):
                sums[i] = 0.0
            top[0] = LOWEST
            total[0] = 0.0
            for tile in T.serial(tiles):
                T.ptx_wait_group(1)
                T.sync_warp()
                _scores(0, queries, slices, key, own, scores, b, partials, warp, warps, lane)
                T.ptx_wait_group(0)
                T.sync_warp()
                _scores(1, queries, slices, key, own, scores, b, partials, warp, warps, lane)
                T.sync_threads()
                _softmax(
                    tile,
                    own,
                    pair,
                    partials,
                    masks,
                    weights,
                    rescale,
                    top,
                    total,
                    scale * LOG2_E,
                    warp,
                    warps,
                    lane,
                )
                _check_slot(tile + 1, kv_rows, masks, slot, warp, lane)
                T.sync_threads()
                _rescale(rescale, fades, sums, warps, lane)
                for half in T.unroll(2):
                    _values(half, slices, value, weights, sums, a, b, warps, lane)
                    # these 16 rows are done with: the next tile's take their place
                    T.sync_warp()
                    _gather_half(half, tile + 1 < tiles, kv, slices, offset, slot, blocks, warp, lane)
                _load_slot(tile + 2, indices, slot, begin, count, lane)
            _finish(
                sink, has_sink, T.min(head + warp * 8 + lane // 4, heads - 1), rescale, top, total, warp, lane
            )
            T.sync_threads()
            _store(out, sums, slices, offset, rescale, fades, token, head, heads, warp, warps, lane)

    return sparse_prefill
