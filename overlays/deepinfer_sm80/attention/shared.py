"""What V4.1's layers can share in the prefill of one step, kept on vLLM's forward context: it dies with the step.

Layers 20-39 read one compressed cache, in five groups of four that select from it anew; the layers before have groups of their
own. So there are three kinds of things to share, each with a key of everything it is made of:

- the geometry: chunks of requests, their lengths and places. It depends on the batch and the compression ratio.
- the gathered compressed rows of the KV source, where they survive (`retained.py`): these depend on its cache, its block table
  and the geometry. A KV source always gathers its own.
- the index tables: Top-K and sliding window as rows of the gathered workspace. They also depend on the index source: the
  layer that selected. A source always makes its own, so a table is never older than the selection it was made of.

Nothing is found again under another forward context: vLLM runs the decoder's replay (0.32 and later) and a drafter under contexts of
their own, with other rows and other window starts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..bindings import is_ours
from .layout import Layout

ATTRIBUTE = "_deepinfer_prefill"
ALIGNMENT = 128


@dataclass(frozen=True)
class Chunk:
    """Requests whose rows are gathered and attended at once.

    Attributes:
        first, last: requests, of the step's prefills.
        compressed: width of the compressed rows of a request; its window's rows start there.
        width: rows of a request in the workspace.
        begin, end: rows of q.
        seq_lens, gather_lens, starts: of the chunk's requests, on the GPU; `starts` has one more.
        states: seq_lens in compressed rows, or None.
        longest: the most compressed rows of a request, for the gather's grid; None where the gather does not ask.
    """

    first: int
    last: int
    compressed: int
    width: int
    begin: int
    end: int
    seq_lens: Any
    gather_lens: Any
    starts: Any
    states: Any
    longest: int | None


@dataclass(frozen=True)
class Geometry:
    """The chunks of a step's prefill; `kept` are the tensors of its key, so that no other can take their addresses."""

    chunks: tuple[Chunk, ...]
    kept: tuple[Any, ...]


@dataclass(frozen=True)
class Table:
    """A chunk's index table: `rows` [tokens, width] and `lengths`, or the same as ragged lists for stock's kernel."""

    rows: Any
    lengths: Any
    ragged: tuple[Any, Any] | None


@dataclass(frozen=True, eq=False)
class Kept:
    """Compressed rows that a layer has gathered; `what` are the objects of its key, so that no other can take their ids."""

    key: tuple[Any, ...]
    what: tuple[Any, ...]


@dataclass
class Step:
    """What has been built under one forward context.

    Attributes:
        context: the context; another one that came by this object (a copy) must not use it.
        geometries: key → geometry.
        tables: whether the layer has compressed rows → key and tables of the last layer that built some.
        rows: what lies gathered at the workspace's end, or None: its key, and the tensors and metadata that the key names.
        used: layers that have run. One that comes again starts a new forward.
        reserved: stands for the tables while vLLM measures memory.
    """

    context: weakref.ref[Any]
    geometries: dict[tuple[Any, ...], Geometry] = field(default_factory=dict)
    tables: dict[bool, tuple[tuple[Any, ...], tuple[Table, ...]]] = field(default_factory=dict)
    rows: Kept | None = None
    used: set[str] = field(default_factory=set)
    reserved: Any = None


def of(context: Any) -> Step:
    """What layers have built under this forward context."""
    found = vars(context).get(ATTRIBUTE)
    if found is None or found.context() is not context:
        found = Step(weakref.ref(context))
        setattr(context, ATTRIBUTE, found)
    return found


def enter(context: Any, layer: Any) -> Step:
    """The same for a layer that starts its prefill; a second forward under one context shares nothing with the first."""
    step = of(context)
    if layer.prefix in step.used:
        step = Step(weakref.ref(context))
        setattr(context, ATTRIBUTE, step)
    step.used.add(layer.prefix)
    return step


def geometry(step: Step, form: Layout, layer: Any, metadata: Any, swa_only: bool) -> Geometry:
    """The step's chunks for a layer, built once for all layers of one compression ratio.

    The layers' window caches are in several groups, each with a metadata object of its own; what chunks are made of is the same
    tensors in all of them. `gather_lens` is not: each group computes its own, of `seq_lens`, `query_start_loc` and the
    replay's start. These are in the key instead where the metadata carries the last; where it does not, `gather_lens` is.
    """
    replay = getattr(metadata, "replay_start", None)
    if replay is None and hasattr(metadata, "replay_start"):
        replay = metadata.prefill_gather_lens
    kept = (metadata.prefill_seq_lens, metadata.query_start_loc, metadata.query_start_loc_cpu, replay)
    counts = (
        metadata.num_decodes,
        metadata.num_prefills,
        metadata.num_decode_tokens,
        metadata.num_prefill_tokens,
    )
    limits = (layer.window_size, layer.max_model_len, layer.max_num_batched_tokens, layer.PREFILL_CHUNK_SIZE)
    key = (layer.compress_ratio, swa_only, *counts, *limits, *map(identity, kept))
    found = step.geometries.get(key)
    if found is None:
        plan = _plan(form, layer, metadata, swa_only)
        chunks = tuple(_chunk(form, layer, metadata, swa_only, *part) for part in plan)
        found = step.geometries[key] = Geometry(chunks, kept)
    return found


def tables(
    step: Step, rocm: ModuleType, layer: Any, metadata: Any, shape: Geometry, swa_only: bool
) -> tuple[Table, ...]:
    """The index tables of the layer's chunks, built once for all layers that read one selection."""
    source = None if swa_only else layer.index_source_layer_id
    selected = layer.topk_indices_buffer
    ragged = not is_ours(rocm.rocm_sparse_attn_prefill)
    key = (id(shape), source, identity(selected), layer.compress_ratio, layer.window_size, ragged)
    found = step.tables.get(swa_only)
    if found is not None and found[0] == key and not (source is not None and layer.is_index_source):
        return found[1]
    # the old group's tables go before the new ones come
    step.tables.pop(swa_only, None)
    found = None
    first = metadata.num_decode_tokens
    rows = selected[first : first + metadata.num_prefill_tokens]
    built = tuple(_table(rocm, layer, rows, chunk, swa_only, ragged) for chunk in shape.chunks)
    step.tables[swa_only] = key, built
    return built


@contextmanager
def profiled(layer: Any, context: Any, tokens: int) -> Iterator[None]:
    """Runs a layer; in vLLM's memory profile the tables' bytes are held where a real step holds them.

    That is between attentions: within one, stock has a table of its own, so the profile's peak there is as in stock.
    """
    if context.attn_metadata is not None:
        yield
        return
    import torch

    step = of(context)
    step.reserved = None
    yield
    selected = layer.topk_indices_buffer
    if not (selected.is_cuda and torch.cuda.is_current_stream_capturing()):
        window = _aligned(layer.window_size) + 1
        width = _aligned(selected.shape[-1] + layer.window_size) + 1 + window
        step.reserved = torch.empty((tokens, width), dtype=torch.int32, device=selected.device)


def identity(tensor: Any) -> tuple[Any, ...] | None:
    """Which memory a tensor shows, and how."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def widest(layer: Any, swa_only: bool) -> tuple[int, int]:
    """Compressed rows and all rows of a request, in the widest layout there can be: what the workspace is for."""
    ratio = layer.compress_ratio
    compressed = 0 if swa_only else (layer.max_model_len + ratio - 1) // ratio
    return compressed, compressed + layer.window_size + layer.max_num_batched_tokens


def _plan(form: Layout, layer: Any, metadata: Any, swa_only: bool) -> list[tuple[int, int, int, int]]:
    size = layer.PREFILL_CHUNK_SIZE
    if form.planned:
        return metadata.get_prefill_chunk_plan(
            compress_ratio=layer.compress_ratio, prefill_chunk_size=size, has_compressed=not swa_only
        )
    count = metadata.num_prefills
    return [(first, min(first + size, count), *widest(layer, swa_only)) for first in range(0, count, size)]


def _chunk(
    form: Layout,
    layer: Any,
    metadata: Any,
    swa_only: bool,
    first: int,
    last: int,
    compressed: int,
    width: int,
) -> Chunk:
    decodes = metadata.num_decodes
    ends = metadata.query_start_loc_cpu
    base = int(ends[decodes])
    lengths = metadata.prefill_seq_lens[first:last]
    longest = None
    if form.hint and not swa_only:
        # from the CPU's copy: asking the GPU would wait for it
        longest = int(metadata.prefill_seq_lens_cpu[first:last].max()) // layer.compress_ratio
    return Chunk(
        first=first,
        last=last,
        compressed=compressed,
        width=width,
        begin=int(ends[decodes + first]) - base,
        end=int(ends[decodes + last]) - base,
        seq_lens=lengths,
        gather_lens=metadata.prefill_gather_lens[first:last],
        starts=metadata.query_start_loc[decodes + first : decodes + last + 1],
        states=None if swa_only else lengths // layer.compress_ratio,
        longest=longest,
    )


def _table(rocm: ModuleType, layer: Any, selected: Any, chunk: Chunk, swa_only: bool, ragged: bool) -> Table:
    topk = 0 if swa_only else selected.shape[-1]
    rows, lengths = rocm.combine_topk_swa_indices(
        selected[chunk.begin : chunk.end], chunk.starts, chunk.seq_lens, chunk.gather_lens, layer.window_size,
        layer.compress_ratio, topk, chunk.width, chunk.compressed,
    )  # fmt: skip
    lists = None
    if ragged:
        # what stock's prefill would do in every layer
        count = (chunk.last - chunk.first) * chunk.width
        lists = rocm.build_ragged_indices_from_dense(rows.reshape(len(rows), -1), lengths, num_rows=count)
    return Table(rows, lengths, lists)


def _aligned(width: int) -> int:
    return -(-width // ALIGNMENT) * ALIGNMENT
