"""Why a layout is as good as it is, in sentences: each names the thing that it follows from."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_cli.planner import buffers, kv, weights
from deepinfer_cli.serve import memory, partition, settings
from deepinfer_cli.serve.memory import Estimate, Layout, Load

# GiB of the host's memory that vLLM's processes and the system want beside what is pinned
HOST_ROOM = 32
# what vLLM's profiling differed by from the estimate (benchmarks/results/checks/plan_2026-11-30.json)
_MEASURED = 0.01


def why(found: Estimate, load: Load, gpus: int) -> Iterator[str]:
    """What there is to know about `found`, the most important first."""
    layout = found.layout
    pool = f"{found.tokens:,} tokens, {found.pool.concurrency:.2f} x {load.context:,}"
    yield f"{found.arithmetic}; the rest holds {pool}"
    yield from _experts(layout)
    yield from _replicated(layout, load)
    yield from _stages(layout, load)
    yield from _mended(layout, load)
    if layout.gpus < gpus:
        rest = "it has no more stages than it needs, for each is a hop of every token"
        if partition.no_stages(load.release):
            rest = f"vLLM {load.release} runs no pipeline"
        yield f"{gpus - layout.gpus} of {gpus} GPUs are left over: 64 heads are split by 1, 2, 4 or 8, and {rest}"
    yield from _sequences(found, load)
    if not load.engram_on_gpu:
        yield _host(found, load)


def short(layout: Layout, load: Load) -> str:
    """What a layout costs, in a few words for a table."""
    padding = memory.expert_padding(layout)
    found = [f"experts padded by {100 * (padding - 1):.0f} %"] if padding > 1 else []
    if layout.pp > 1:
        one = " by one GPU at a time" if max(layout.tps) == 1 else ""
        found.append(f"single-stream decode crosses {layout.pp} stages{one}")
        if load.speculative == 0:
            found.append("no DSpark")
    if not layout.stock:
        found.append("no vLLM of 0.30 to 0.33")
    elif layout.pp > 1 and partition.no_stages(load.release):
        found.append(f"not with vLLM {load.release}")
    elif kv.missing(load.model, layout.partition, load.traffic):
        found.append("stages need the overlay's `pipeline`")
    return "; ".join(found)


def _experts(layout: Layout) -> Iterator[str]:
    padding = memory.expert_padding(layout)
    if padding > 1:
        tp = max(layout.tps)
        yield (
            f"TP{tp} slices an expert's width {memory.EXPERT_WIDTH:,} into {memory.EXPERT_WIDTH // tp}, "
            f"which Marlin pads to {weights.MARLIN_WIDTH * -(-memory.EXPERT_WIDTH // tp // weights.MARLIN_WIDTH)}: "
            f"{100 * (padding - 1):.0f} % more to hold and to read; --enable-expert-parallel keeps "
            "experts whole, and is not tested with the overlay"
        )
    if layout.expert_parallel:
        yield "experts whole on each GPU, for Marlin would pad their slices; not tested with the overlay"


def _replicated(layout: Layout, load: Load) -> Iterator[str]:
    if max(layout.tps) == 1:
        return
    split = weights.Split(max(layout.tps))
    each = sum(weights.attention(load.model, layer, split) for layer in range(load.model.layers)) / memory.GIB
    alone = (
        sum(weights.attention(load.model, layer, weights.Split()) for layer in range(load.model.layers))
        / memory.GIB
    )
    yield (
        f"TP{max(layout.tps)} shrinks attention weights from {alone:.1f} to {each:.1f} GiB a GPU, not to "
        f"{alone / max(layout.tps):.1f}: latent projections, compressors and indexers are replicated; so is the whole KV cache, "
        "for there is one latent for all heads"
    )


def _stages(layout: Layout, load: Load) -> Iterator[str]:
    if layout.pp == 1:
        return
    hops = f"every token crosses {layout.pp} stages one after the other"
    single = (
        ", and in single-stream decode one GPU works while the others wait" if max(layout.tps) == 1 else ""
    )
    with_it = f"planned with DSpark, {load.speculative} tokens a step" if load.speculative else "no DSpark"
    yield f"{hops}{single}; {with_it}: vLLM 0.30 to 0.33 refuses it for this model with pipeline stages"
    if layout.stock:
        yield (
            "what was shown of pipelines: two stages of one GPU each, a small model, vLLM 0.33 with the overlay, on two H200; not "
            "more stages, not TP in them, not on Ampere (docs/03_VALIDATION.md)"
        )


def _mended(layout: Layout, load: Load) -> Iterator[str]:
    """What of a pipeline stock vLLM 0.30 to 0.33 does not start."""
    runs = layout.stock and not partition.no_stages(load.release)
    lacking = kv.missing(load.model, layout.partition, load.traffic) if runs else []
    if lacking:
        index, group = lacking[-1]
        owners = ", ".join(str(page.layer) for page in group.pages)
        yield (
            f"stock vLLM 0.30 to 0.33 does not start these stages: stage {index + 1} owns no layer of the KV cache group of "
            f"{group.kind} pages (layers {owners}), and allocate_kv_cache raises StopIteration; the overlay's op `pipeline` makes them start"
        )


def starts_on(layout: Layout, load: Load) -> tuple[str, ...]:
    """Which vLLM of 0.30 to 0.33 builds and starts its stages, and runs them right: `stock`, `overlay`, both or none."""
    if any(refused(layout, load.release)):
        return ()
    mended = any(_mended(layout, load))
    return ("overlay",) if mended else ("stock", "overlay")


def refused(layout: Layout, release: str) -> Iterator[str]:
    """Why no vLLM of 0.30 to 0.33 runs `layout`, or not rightly."""
    for tp in dict.fromkeys(layout.tps):
        if tp not in memory.TENSOR_PARALLEL:
            yield f"TP{tp}: 64 heads and 8 output groups must divide evenly, by 1, 2, 4 or 8"
    if layout.uneven:
        yield (
            f"{layout.name}: stages of different TP; vLLM 0.30 to 0.33 has one --tensor-parallel-size for all stages "
            "(vllm/config/parallel.py)"
        )
    verdict = partition.check(layout.partition)
    if not verdict.legal:
        yield verdict.reason
    if layout.pp > partition.MAX_STAGES:
        yield partition.too_many()
    if layout.pp > 1 and (why := partition.no_stages(release)):
        yield why


def refused_short(layout: Layout, release: str) -> Iterator[str]:
    """`refused` in a few words each, of a layout whose TP is possible."""
    if layout.uneven:
        yield "its stages are of different TP"
    if wrong := partition.short(layout.partition):
        yield wrong
    if layout.pp > 1 and partition.no_stages(release):
        yield "it runs no pipeline of this model"


def uncertain(found: Estimate, load: Load) -> Iterator[str]:
    """That what `found` leaves for KV is within what is uncertain of it: of the sum, and of what other cards could not give."""
    stage = found.stages[found.tightest]
    above = max(load.utilization - settings.MOST_SHARE, 0.0) * found.memory
    left, least = (
        found.usable - stage.total,
        max(_MEASURED * stage.total, buffers.GRAPHS / memory.GIB) + above,
    )
    spare = left - left / max(1.0, found.pool.concurrency)
    over = f", and what is above a share of {settings.MOST_SHARE:g}" if above else ""
    error = f"what is uncertain of this estimate: {least:.2f} GiB, 1 % of it or what is allowed for CUDA graphs{over}"
    if left < least:
        yield f"{left:.2f} GiB are left for the KV cache, less than {error}"
    elif spare < least:
        yield (
            f"one request of {load.context:,} takes all but {spare:.2f} GiB of the KV cache, less than {error}; where vLLM "
            "refuses the length it names the longest that it serves"
        )


def huge_pages(found: Estimate, load: Load, host: float | None) -> bool:
    """Engram's tables need huge pages to fit a host of `host` GiB."""
    if load.engram_on_gpu or not load.huge_pages or host is None:
        return False
    return host < found.host.needed(huge_pages=False) + HOST_ROOM


def host_holds(found: Estimate, load: Load, host: float | None) -> bool:
    """A host of `host` GiB has room for what is pinned: Engram's tables, token ids; also where its memory is not known."""
    return host is None or host >= found.host.needed(huge_pages=load.huge_pages)


def sequences_inside(found: Estimate, load: Load) -> int:
    """Sequences whose decode logits stay inside what vLLM's dummy pass has counted, at least one.

    The indexer has one float32 for each position and decoded token (`layers/sparse_attn_indexer.py`). The pass counts one
    block of them, and a decode step may take its activations' place; more comes out of what is outside of vLLM's share.
    """
    return max(int(_counted(found) / _decoded(load)), 1)


def _counted(found: Estimate) -> float:
    return min(stage.parts["activations"] for stage in found.stages)


def _decoded(load: Load) -> float:
    """GiB of indexer logits of one sequence that decodes."""
    return (1 + load.speculative) * load.context * buffers.FLOAT32 / memory.GIB


def _sequences(found: Estimate, load: Load) -> Iterator[str]:
    most = sequences_inside(found, load)
    if most < memory.SEQUENCES and load.sequences >= most:
        yield (
            f"--max-num-seqs {load.sequences}: a sequence that decodes takes {1024 * _decoded(load):.0f} MiB of indexer logits (4 bytes "
            f"for each token and position), and vLLM counts {_counted(found):.1f} GiB of them; more would come out of the "
            f"{found.memory - found.usable:.1f} GiB outside its share"
        )


def _host(found: Estimate, load: Load) -> str:
    text = (
        f"Engram's tables, {found.host.tables:.1f} GiB, are in the host's memory, pinned; PyTorch rounds each pinned tensor up to a "
        f"power of two: {found.host.rounded:.0f} GiB"
    )
    if load.huge_pages:
        text += ', and {"use_thp": true} in --engram-config keeps it from that'
    return text
