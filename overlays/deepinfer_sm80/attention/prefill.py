"""Prefill of a layer: gather the rows it attends to, then attend; what other layers have built is taken from `shared.py`.

The steps and their arguments are stock's (`_forward_prefill` of the portable class), through the module's own names: each is our
op where it is bound, and stock's where it is not.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import retained, shared
from .layout import Layout


# fmt: off
def run(
    rocm: ModuleType, form: Layout, layer: Any, q: Any, compressed_cache: Any, window_cache: Any, output: Any,
    attn_metadata: Any, swa_metadata: Any,
) -> None:
    # fmt: on
    """Attend from the step's prefill tokens.

    Args:
        rocm: the module of the portable class.
        form: its layout.
        layer: the layer; which one it is decides what it may share.
        q: `[tokens, heads, 512]`, prefill tokens first.
        compressed_cache: pages of the layer's KV source; None for a layer with a window alone.
        window_cache: pages of the layer's sliding window.
        output: like q; written, not rotated.
        attn_metadata: of the KV source's group, or None.
        swa_metadata: of the window's group.
    """
    swa_only = attn_metadata is None
    step = shared.enter(rocm.get_forward_context(), layer)
    shape = shared.geometry(step, form, layer, swa_metadata, swa_only)
    tables = shared.tables(step, rocm, layer, swa_metadata, shape, swa_only)
    rows = _workspace(rocm, layer, q, swa_only)
    first = _first_row(rows, shape, swa_only)
    gathered = _is_gathered(step, layer, rows, first, compressed_cache, attn_metadata, shape)
    decodes = swa_metadata.num_decodes
    for chunk, table in zip(shape.chunks, tables, strict=True):
        count = chunk.last - chunk.first
        start = first or 0
        kv = rows[start : start + count * chunk.width].view(count, chunk.width, -1)
        if not (swa_only or gathered):
            pages = attn_metadata.block_table[decodes + chunk.first : decodes + chunk.last]
            size = attn_metadata.block_size // layer.compress_ratio
            hint = {"max_gather_len": chunk.longest} if form.hint else {}
            rocm.dequantize_and_gather_k_cache(
                kv, compressed_cache, seq_lens=chunk.states, gather_lens=None, block_table=pages, block_size=size,
                offset=0, **hint,
            )  # fmt: skip
        pages = swa_metadata.block_table[decodes + chunk.first : decodes + chunk.last]
        rocm.dequantize_and_gather_k_cache(
            kv, window_cache, seq_lens=chunk.seq_lens, gather_lens=chunk.gather_lens, block_table=pages,
            block_size=swa_metadata.block_size, offset=chunk.compressed,
        )  # fmt: skip
        _attend(rocm, layer, q, kv, output, chunk, table)


def _first_row(rows: Any, shape: shared.Geometry, swa_only: bool) -> int | None:
    """Where in the workspace a chunk's rows can stay for later layers; None where they cannot.

    Of several chunks the next would overwrite the last.
    """
    if swa_only or len(shape.chunks) != 1:
        return None
    (chunk,) = shape.chunks
    return retained.place(rows, (chunk.last - chunk.first) * chunk.width)


# fmt: off
def _is_gathered(
    step: shared.Step, layer: Any, rows: Any, first: int | None, cache: Any, metadata: Any, shape: shared.Geometry,
) -> bool:
    # fmt: on
    """Whether an earlier layer has gathered this chunk's rows, and they are still there; if not, they will be, or nothing."""
    key = (layer.compress_ratio, shared.identity(cache), id(metadata), id(shape), shared.identity(rows), first)
    found = step.rows
    same = found is not None and found.key == key and retained.owner(rows) is found
    if first is not None and same and not layer.is_kv_source:
        return True
    step.rows = None if first is None else shared.Kept(key, (cache, metadata, shape))
    retained.claim(rows, first, step.rows)
    return False


def _attend(rocm: ModuleType, layer: Any, q: Any, kv: Any, output: Any, chunk: shared.Chunk, table: shared.Table) -> None:
    lists = {}
    if table.ragged is not None:
        lists = {"ragged_indices": table.ragged[0], "ragged_indptr": table.ragged[1]}
    rocm.rocm_sparse_attn_prefill(
        q=q[chunk.begin : chunk.end], kv=kv.view(-1, 1, q.shape[-1]), indices=table.rows, topk_length=table.lengths,
        scale=layer.scale, head_dim=layer.head_dim, nope_head_dim=layer.nope_head_dim, rope_head_dim=layer.rope_head_dim,
        attn_sink=layer.attn_sink, output=output[chunk.begin : chunk.end], **lists,
    )  # fmt: skip


def _workspace(rocm: ModuleType, layer: Any, q: Any, swa_only: bool) -> Any:
    """Rows of bfloat16 from vLLM's workspace: the bytes that stock's class asks for, and reserves in its profile run."""
    import torch

    shape = (layer.PREFILL_CHUNK_SIZE, shared.widest(layer, swa_only)[1], q.shape[-1])
    with retained.own():
        (rows,) = rocm.current_workspace_manager().get_simultaneous((shape, torch.bfloat16))
    return rows.view(-1, q.shape[-1])
