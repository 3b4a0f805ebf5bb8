"""How much memory DeepSeek-V4.1 takes of each GPU and of the host: a small estimate, in one place.

All sizes are GiB. The weights are the checkpoint's (475.3 GiB); what vLLM makes of them on SM8x follows its loaders:
experts of a width that Marlin pads, `wo_a` unpacked to bfloat16, vision on every GPU, Engram's tables in the host's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer_cli.serve.partition import ENGRAM_LAYERS, KV_SOURCES, LAYERS, minor, text

GIB = 2**30
CHECKPOINT = 475.3
ENGRAM = 188.8
EXPERTS = 275.7
EXPERT_WIDTH = 2304
# Marlin's MXFP4 experts are as wide as a multiple of this (`mxfp4_round_up_hidden_size_and_intermediate_size`)
MARLIN_WIDTH = 128
# of 5.2: `fused_wqa_wkv` is on every GPU of a stage (`disable_tp`), the rest is split
ATTENTION_SPLIT, ATTENTION_WHOLE = 4.8, 0.4
# 40 x 8,192 x 4,096: a byte each in the checkpoint, two once unpacked
WO_A_PACKED, WO_A_UNPACKED = 1.25, 2.5
SHARED_EXPERTS, EMBEDDING, HEAD, VISION = 1.4, 1.3, 1.3, 0.9
DSPARK = 7.5
# activations, CUDA graphs, NCCL's buffers, the logits: an allowance, not a measurement
ALLOWANCE = 2.5
# bytes for each token of the KV pool that a source's stage keeps, with page rounding at block size 128
KV_BYTES = {2: 360, 8: 360, 14: 360, 20: 720}
# 64 heads and 8 output groups are split evenly
TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model is spread.

    Attributes:
        tp: GPUs of one stage.
        partition: layers of each stage.
        expert_parallel: whole experts on each GPU instead of a slice of every expert.
    """

    tp: int
    partition: tuple[int, ...] = (LAYERS,)
    expert_parallel: bool = False

    @property
    def pp(self) -> int:
        """Stages."""
        return len(self.partition)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp

    @property
    def name(self) -> str:
        """Such as `TP4 x PP2 (20,20)`."""
        stages = f" x PP{self.pp} ({text(self.partition)})" if self.pp > 1 else ""
        return f"TP{self.tp}{stages}" + (" with expert parallelism" if self.expert_parallel else "")


@dataclass(frozen=True, slots=True)
class Load:
    """What is served: context length, speculation, and how much of a GPU vLLM may take."""

    release: str = "0.33.0"
    context: int = 1_048_576
    batched_tokens: int = 8192
    speculative: bool = True
    utilization: float = 0.92
    engram_on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """One GPU of one stage: GiB of each part, and bytes that a token of the pool takes there."""

    parts: dict[str, float]
    token_bytes: int

    @property
    def total(self) -> float:
        """GiB before any KV cache."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Estimate:
    """A layout on GPUs of `memory` GiB.

    Attributes:
        usable: GiB that vLLM may take of one GPU.
        stages: first to last.
        tokens: of the KV pool, as the tightest stage allows; 0 where the rest does not fit.
    """

    layout: Layout
    memory: float
    usable: float
    stages: tuple[Stage, ...]
    tokens: int

    @property
    def tightest(self) -> int:
        """The index of the stage that leaves the least."""
        return min(range(len(self.stages)), key=lambda one: self.usable - self.stages[one].total)

    @property
    def arithmetic(self) -> str:
        """The sum of the tightest stage, for people."""
        stage = self.stages[self.tightest]
        where = f"stage {self.tightest + 1} of " if len(self.stages) > 1 else ""
        summands = " + ".join(f"{size:.1f} {name}" for name, size in stage.parts.items() if size >= 0.05)
        return f"{where}{self.layout.name}: {summands} = {stage.total:.1f} GiB of {self.usable:.1f} GiB"


def expert_padding(layout: Layout) -> float:
    """How much larger Marlin makes the experts: each GPU's width is rounded up to 128."""
    if layout.expert_parallel:
        return 1.0
    width = EXPERT_WIDTH / layout.tp
    return math.ceil(width / MARLIN_WIDTH) * MARLIN_WIDTH / width


def workspace(load: Load) -> float:
    """GiB of vLLM's one shared workspace: the larger of what prefill gathers and what the indexer gathers.

    Prefill: four requests of bf16 rows of 512 (`max_model_len`, the window, the batch). Indexer: rows of 132 bytes, 40 for
    each position; from 0.32 on 16 above 262,144 positions.
    """
    prefill = 4 * (load.context + 128 + load.batched_tokens) * 1024
    rows = 16 if load.context > 262_144 and minor(load.release) >= 32 else 40
    return max(prefill, 132 * rows * load.context) / GIB


def estimate(layout: Layout, memory: float, load: Load) -> Estimate:
    """What `layout` takes of GPUs with `memory` GiB."""
    usable = memory * load.utilization
    stages, start = [], 0
    for index, count in enumerate(layout.partition):
        stages.append(_stage(layout, load, start, count, index))
        start += count
    room = [(usable - stage.total) * GIB / stage.token_bytes for stage in stages if stage.token_bytes]
    fits = all(stage.total < usable for stage in stages)
    return Estimate(layout, memory, usable, tuple(stages), max(int(min(room, default=0)), 0) if fits else 0)


def _stage(layout: Layout, load: Load, start: int, count: int, index: int) -> Stage:
    share, tp, last = count / LAYERS, layout.tp, index == layout.pp - 1
    inside = range(start, start + count)
    # the drafter's experts are experts, too
    padding = expert_padding(layout)
    tables = ENGRAM / 2 * sum(layer in inside for layer in ENGRAM_LAYERS) if load.engram_on_gpu else 0.0
    parts = {
        "experts": EXPERTS * share * padding / tp,
        "attention": (ATTENTION_SPLIT - WO_A_PACKED + WO_A_UNPACKED) * share / tp + ATTENTION_WHOLE * share,
        "shared experts": SHARED_EXPERTS * share / tp,
        "embedding and head": (EMBEDDING * (index == 0) + HEAD * last) / tp,
        "vision": VISION,
        "DSpark": DSPARK * padding / tp if load.speculative and last else 0.0,
        "Engram": tables / tp,
        "workspace": workspace(load),
        "allowance": ALLOWANCE,
    }
    return Stage(parts, sum(KV_BYTES[source] for source in KV_SOURCES if source in inside))
