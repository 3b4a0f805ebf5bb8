"""What a model's weights take of each GPU, by part, from its shape: as vLLM 0.30 to 0.33 lays them out on SM8x.

All sizes are bytes. Every sum is over the tensors that `models/deepseek_v41` of vLLM creates; `tp` splits what its
column- and row-parallel layers split, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer_cli.planner.shape import Shape

# a byte each and a UE8M0 scale for 32 of them: the checkpoint has one for a block of 32 rows, vLLM expands it to each row
# (models/deepseek_v41/quant_config.py)
MXFP8, MXFP8_STORED = 1 + 1 / 32, 1 + 1 / 1024
# half a byte each and a scale byte for 32 of them
MXFP4 = 17 / 32
BF16, FLOAT32 = 2, 4
# Marlin's MXFP4 experts are as wide as a multiple of this, and read a multiple of that
# (fused_moe/oracle/mxfp4.py:mxfp4_round_up_hidden_size_and_intermediate_size)
MARLIN_WIDTH, MARLIN_HIDDEN = 128, 256
# vocabularies are padded to a multiple of this (layers/vocab_parallel_embedding.py)
VOCAB_PADDING = 64
# the published config's encoder: 0.9 GiB, the size alone is known
FLASH_VISION = int(0.9 * 2**30)
PARTS = (
    "experts",
    "attention",
    "shared experts",
    "mixing",
    "embedding and head",
    "vision",
    "DSpark",
    "Engram",
)


@dataclass(frozen=True, slots=True)
class Split:
    """How one GPU's share is cut.

    Attributes:
        tp: GPUs of a stage.
        expert_parallel: whole experts on each GPU instead of a slice of every expert.
        vision: the image encoder is built (`--limit-mm-per-prompt '{"image": 0}'` leaves it out).
        engram_on_gpu: Engram's tables are on the GPUs.
        draft: DSpark's layers are there.
        stored: as the checkpoint has it: `wo_a` packed, which the portable attention class on SM8x needs as bfloat16 rows.
    """

    tp: int = 1
    expert_parallel: bool = False
    vision: bool = True
    engram_on_gpu: bool = False
    draft: bool = False
    stored: bool = False

    @property
    def linear(self) -> float:
        """Bytes of a linear layer's value."""
        return MXFP8_STORED if self.stored else MXFP8


def expert_padding(shape: Shape, split: Split) -> float:
    """How much larger Marlin makes the experts: the width of each GPU's slice is rounded up."""
    parts = 1 if split.expert_parallel else split.tp
    width = shape.expert_width / parts
    return _up(math.ceil(width), MARLIN_WIDTH) / width * _up(shape.hidden, MARLIN_HIDDEN) / shape.hidden


def stage(shape: Shape, layers: range, split: Split, *, first: bool, last: bool) -> dict[str, float]:
    """Bytes by part (`PARTS`) on one GPU of the stage that holds `layers`."""
    padding = expert_padding(shape, split)
    drafted = range(shape.draft_layers) if split.draft and last else range(0)
    vocab = _up(shape.vocab, VOCAB_PADDING) * shape.hidden * BF16 / split.tp
    return {
        "experts": len(layers) * experts(shape, shape.experts) * padding / split.tp,
        "attention": sum(attention(shape, layer, split) for layer in layers),
        "shared experts": len(layers) * shape.shared_experts * _mlp(shape) * split.linear / split.tp,
        "mixing": len(layers) * _mixing(shape, shape.experts),
        "embedding and head": vocab * (first + last),
        "vision": vision(shape, split.tp) if split.vision else 0.0,
        "DSpark": draft(shape, split, padding) if drafted else 0.0,
        "Engram": sum(engram(shape, layer, split) for layer in shape.engram.layers if layer in layers),
    }


def experts(shape: Shape, count: int) -> float:
    """The routed experts of a layer, not padded."""
    return count * _mlp(shape) * MXFP4


def attention(shape: Shape, layer: int, split: Split) -> float:
    """A layer's attention: projections, compressor and indexer; layers past the model's are DSpark's."""
    heads, rank, linear = shape.heads * shape.head_dim, shape.o_groups * shape.o_rank, split.linear
    # `fused_wqa_wkv` is on every GPU (`disable_tp`), as are compressor and indexer (`ReplicatedLinear`)
    whole = shape.hidden * (shape.q_rank + shape.head_dim) * linear
    wo_a = heads // shape.o_groups * rank * (linear if split.stored else BF16 + 1 / 32)
    parted = (shape.q_rank * heads + rank * shape.hidden) * linear + wo_a
    if layer in shape.kv_sources:
        gate = 2 if shape.ratios[layer] > 1 else 1
        whole += shape.hidden * gate * shape.head_dim * BF16
    if layer in shape.index_sources:
        whole += (
            shape.q_rank * shape.index_heads * shape.index_dim * linear
            + shape.hidden * shape.index_heads * BF16
        )
        whole += shape.head_dim * shape.index_dim * BF16 * (layer in shape.kv_sources)
    return whole + parted / split.tp


def vision(shape: Shape, tp: int) -> float:
    """The image encoder on one GPU of any stage: every stage builds it (`models/deepseek_v41/nvidia/vl_model.py`)."""
    found = shape.vision
    if found is None:
        # its heads are split as TP goes (`mm_encoder_tp_mode` weights); what is not known of it counts as whole
        return float(FLASH_VISION) if shape.experts == 384 else 0.0
    block = 4 * found.hidden**2 + 3 * found.hidden * found.inner
    aligner = (found.hidden * found.downsample**2 + shape.hidden) * shape.hidden
    return (found.layers * block + aligner) * BF16 / tp + 3 * found.patch**2 * found.hidden * BF16


def draft(shape: Shape, split: Split, padding: float) -> float:
    """DSpark's layers, its projection of the target's hidden states, and the Markov head (`nvidia/dspark.py`)."""
    each = experts(shape, shape.draft_experts) * padding / split.tp
    each += attention(shape, shape.layers, split) + _mixing(shape, shape.draft_experts)
    each += shape.shared_experts * _mlp(shape) * split.linear / split.tp
    heads = 2 * _up(shape.vocab, VOCAB_PADDING) * shape.draft_rank * BF16 / split.tp
    return shape.draft_layers * each + shape.draft_targets * shape.hidden**2 * split.linear + heads


def engram(shape: Shape, layer: int, split: Split) -> float:
    """A layer's Engram on one GPU: its projection, and the table's share where that is on the GPUs."""
    width = shape.engram.lookups * shape.engram.dim
    projection = width * shape.hidden * (shape.streams + 1) * split.linear / split.tp
    table = table_bytes(shape, layer) / split.tp if split.engram_on_gpu else 0.0
    return projection + table + 2 * shape.streams * shape.hidden * BF16


def table_bytes(shape: Shape, layer: int) -> int:
    """The table of one Engram layer."""
    return shape.engram.rows[shape.engram.layers.index(layer)] * shape.engram.row_bytes


def tables(shape: Shape, layers: Iterable[int] | None = None) -> int:
    """All tables of `layers`; default all."""
    found = shape.engram.layers if layers is None else [one for one in shape.engram.layers if one in layers]
    return sum(table_bytes(shape, layer) for layer in found)


def checkpoint(shape: Shape) -> float:
    """The checkpoint: the same tensors as it stores them."""
    split = Split(draft=shape.draft_layers > 0, engram_on_gpu=True, stored=True)
    return sum(stage(shape, range(shape.layers), split, first=True, last=True).values())


def _mlp(shape: Shape) -> int:
    return 3 * shape.hidden * shape.expert_width


def _mixing(shape: Shape, count: int) -> float:
    """Two float32 matrices that mix the residual streams, the router, and the norms."""
    streams = shape.streams
    mixing = 2 * streams * (streams + 2) * streams * shape.hidden * FLOAT32
    return mixing + count * shape.hidden * BF16 + 2 * shape.hidden * BF16


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
