"""What vLLM takes of each GPU beside weights and KV cache: tables, workspace, buffers, activations, and an allowance.

All sizes are bytes. `workspace` and `tables` follow the allocations in vLLM's code; `activations` is a sum over what one
step keeps at once, and the last constants cover what is in no tensor: both are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_cli.planner import kv
from deepinfer_cli.planner.shape import Shape

BF16, FLOAT32, INT32 = 2, 4, 4
# rows of bf16 that prefill gathers for this many requests at once (models/deepseek_v41/amd/rocm.py, PREFILL_CHUNK_SIZE)
PREFILL_REQUESTS = 4
# what one row of the indexer's keys takes, and rows for each position (v1/attention/backends/mla/indexer.py:
# get_max_prefill_buffer_size; config/vllm.py: the factor is 5, from 0.32 on 2 above 262,144 positions)
INDEX_ROW, ROWS_PER_FACTOR, FACTOR, LONG_FACTOR, LONG = 132, 8, 5, 2, 262_144
# one block of logits of the indexer (envs.py, VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)
INDEX_LOGITS = 512 << 20
# candidate blocks of positions that the first index source of ratio 1 leaves to the others
CANDIDATES = 2_048
# CUDA graphs and what several GPUs exchange through: an allowance. Libraries and vLLM's own buffers: what was left on an H200
GRAPHS, LIBRARIES, COMMUNICATION = 512 << 20, 208 << 20, 384 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """What buffers are sized for, beside the traffic.

    Attributes:
        release: vLLM's version.
        sequences: `--max-num-seqs`.
        tp: GPUs of the stage.
        stages: of the pipeline.
        last: whether the stage ends the pipeline.
        draft: DSpark's layers are on this stage.
    """

    release: str = "0.33.0"
    sequences: int = 256
    tp: int = 1
    stages: int = 1
    last: bool = True
    draft: bool = False


def stage(shape: Shape, layers: range, traffic: kv.Traffic, served: Served) -> dict[str, float]:
    """Bytes by part on one GPU of the stage that holds `layers`."""
    return {
        "tables": float(tables(shape, layers, traffic, served)),
        "workspace": float(workspace(shape, layers, traffic, served.release)),
        "activations": activations(shape, traffic, served),
        "graphs and libraries": float(
            GRAPHS + LIBRARIES + (COMMUNICATION if served.tp * served.stages > 1 else 0)
        ),
    }


def tables(shape: Shape, layers: range, traffic: kv.Traffic, served: Served) -> int:
    """Rotary tables, block tables, Top-K and candidate indices, and what stages hand on: there from the start.

    Sources: `models/deepseek_v41/common/rope.py` (one float32 table for windows, one for compressed layers, each of
    `max_position_embeddings` rows), `v1/worker/gpu/block_table.py` (two tables for each group), `nvidia/model.py`.
    """
    ratios = {min(shape.ratios[layer], 1) for layer in layers} | ({0} if served.draft else set())
    rotary = len(ratios) * shape.positions * shape.rope_dim * FLOAT32
    found = kv.groups(shape, traffic)
    blocks = sum(
        -(-traffic.context // group.pages[0].tokens) if group.kind != "ring" else 1 for group in found
    )
    block_tables = 2 * served.sequences * blocks * INT32
    indices = traffic.batched_tokens * (shape.index_top_k + CANDIDATES) * INT32
    streams = traffic.batched_tokens * shape.streams * shape.hidden * BF16
    handed = streams * (served.stages > 1) + streams * served.draft
    staged = traffic.batched_tokens * shape.engram.lookups * shape.engram.dim * BF16 // served.tp
    return (
        rotary + block_tables + indices + handed + staged * sum(one in layers for one in shape.engram.layers)
    )


def workspace(shape: Shape, layers: range, traffic: kv.Traffic, release: str) -> int:
    """vLLM's one shared workspace: the largest of what prefill gathers, what the indexer gathers, and what experts make.

    `models/deepseek_v41/amd/rocm.py:_prefill_workspace_shapes`, `layers/sparse_attn_indexer.py:_gather_workspace_shapes`,
    and for each token's experts two rows of the model's width (`fused_moe/experts/marlin_moe.py:workspace_shapes`).
    """
    ratios = [shape.ratios[layer] for layer in layers if shape.ratios[layer]]
    rows = -(-traffic.context // min(ratios)) if ratios else 0
    gathered = PREFILL_REQUESTS * (rows + shape.window + traffic.batched_tokens) * shape.head_dim * BF16
    indexed = [shape.ratios[layer] for layer in shape.index_sources if layer in layers]
    factor = LONG_FACTOR if traffic.context > LONG and minor(release) >= 32 else FACTOR
    keys = INDEX_ROW * ROWS_PER_FACTOR * factor * traffic.context // min(indexed) if indexed else 0
    made = 2 * traffic.batched_tokens * shape.experts_per_token * shape.hidden * BF16
    return max(gathered, keys, made)


def activations(shape: Shape, traffic: kv.Traffic, served: Served) -> float:
    """The most that one step keeps at once, beside the workspace: an estimate.

    Four copies of the residual streams, queries and outputs of every head, and a block of the indexer's logits: within 1 %
    what vLLM 0.33.0's dummy pass took on an H200 with 2,048 and with 8,192 tokens. That TP splits the heads' share is
    assumed. At the end logits in bfloat16 and float32, once for each sequence, whatever is drafted
    (`v1/worker/gpu/model_runner.py:profile_run`).
    """
    streams = 4 * shape.streams * shape.hidden * BF16
    heads = 2 * shape.heads * shape.head_dim * BF16 / served.tp
    rows = min(served.sequences, traffic.batched_tokens)
    logits = rows * shape.vocab * (BF16 + 2 * FLOAT32) if served.last else 0
    return max(INDEX_LOGITS + traffic.batched_tokens * (streams + heads), float(logits))


def minor(release: str) -> int:
    """33 of 0.33.0; 33 where it is not said."""
    part = release.split(".")[1] if release.count(".") else ""
    return int(part) if part.isdecimal() else 33
