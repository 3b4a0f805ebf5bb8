"""A layout's memory: what each GPU of each stage and the host hold, and the KV pool that is left.

Sizes are GiB. Weights, tables and vLLM's KV accounting follow the model's shape and vLLM's code (`deepinfer_cli.planner`);
activations, graphs and libraries are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from deepinfer_cli.planner import buffers, kv, weights
from deepinfer_cli.planner.shape import FLASH, Shape
from deepinfer_cli.serve.partition import LAYERS, check, text

GIB = 2**30
EXPERT_WIDTH = FLASH.expert_width
ENGRAM = round(weights.tables(FLASH) / GIB, 1)
# 64 heads and 8 output groups are split evenly
TENSOR_PARALLEL = (1, 2, 4, 8)
DRAFT_TOKENS = 5
BLOCK_SIZE = 128
SEQUENCES = 256
# CUDA's total of a card (`cudaMemGetInfo`, of which vLLM takes its share) over nvidia-smi's and NVML's: the driver keeps the rest.
# In PyTorch's out-of-memory messages, as users have published them, a card of 80 GiB has 79.15, of 48 47.54, of 40 39.39 to
# 39.56, of 24 23.69: shares of 0.985 to 0.990, and that of 80 GiB is taken for all. On an H200 it was more: 139.80 GiB
# (benchmarks/results/checks/plan_2026-11-30.json) of the 143,771 MiB that nvidia-smi shows of one.
CUDA_SEES = 0.9894


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model is spread.

    Attributes:
        tp: GPUs of one stage.
        partition: layers of each stage.
        expert_parallel: whole experts on each GPU instead of a slice of every expert.
        uneven: GPUs of each stage where they differ; no vLLM of 0.30 to 0.33 has that.
    """

    tp: int
    partition: tuple[int, ...] = (LAYERS,)
    expert_parallel: bool = False
    uneven: tuple[int, ...] = ()

    @property
    def pp(self) -> int:
        """Stages."""
        return len(self.partition)

    @property
    def tps(self) -> tuple[int, ...]:
        """GPUs of each stage."""
        return self.uneven or (self.tp,) * self.pp

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(self.tps)

    @property
    def stock(self) -> bool:
        """vLLM 0.30 to 0.33 has such stages (`partition.check`)."""
        return not self.uneven and check(self.partition).legal

    @property
    def name(self) -> str:
        """Such as `TP4 x PP2 (20,20)`."""
        name = f"TP{self.tp}" + (f" x PP{self.pp} ({text(self.partition)})" if self.pp > 1 else "")
        if self.uneven:
            name = " + ".join(f"TP{tp}" for tp in self.uneven) + f" ({text(self.partition)})"
        return name + (" with expert parallelism" if self.expert_parallel else "")


@dataclass(frozen=True, slots=True)
class Load:
    """What is served, and how much of a GPU vLLM may take.

    Attributes:
        concurrency: requests of the whole context that the pool must hold at once.
        sequences: `--max-num-seqs`.
        speculative: DSpark's tokens in each step; 0 without it.
        utilization: `--gpu-memory-utilization`.
        vision: the image encoder is built.
    """

    release: str = "0.33.0"
    context: int = FLASH.positions
    concurrency: float = 1.0
    batched_tokens: int = 8192
    sequences: int = SEQUENCES
    speculative: int = DRAFT_TOKENS
    utilization: float = 0.92
    engram_on_gpu: bool = False
    vision: bool = True
    block_size: int = BLOCK_SIZE
    model: Shape = FLASH

    @property
    def traffic(self) -> kv.Traffic:
        """What the KV cache is sized for."""
        return kv.Traffic(self.context, self.batched_tokens, self.block_size, self.speculative)

    def data(self) -> dict[str, Any]:
        """For a JSON document: everything but the model's shape."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "model"}

    @property
    def huge_pages(self) -> bool:
        """`use_thp` can keep the host's tables from being rounded up: from 0.31 on (`vllm/config/engram.py`)."""
        return buffers.minor(self.release) >= 31


@dataclass(frozen=True, slots=True)
class Stage:
    """One GPU of one stage: layers, GPUs, GiB of each part, and bytes that a block of the KV pool takes there."""

    parts: dict[str, float]
    layers: range = field(default=range(0))
    tp: int = 1
    block_bytes: int = 0

    @property
    def total(self) -> float:
        """GiB before any KV cache."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Host:
    """The host's memory.

    Attributes:
        tables: GiB of Engram's tables; 0 where they are on the GPUs.
        rounded: GiB once PyTorch has rounded each pinned tensor up to a power of two.
        tokens: GiB of token ids that every GPU's process keeps, pinned.
    """

    tables: float
    rounded: float
    tokens: float

    def needed(self, *, huge_pages: bool) -> float:
        """GiB that are pinned in all."""
        return (self.tables if huge_pages else self.rounded) + self.tokens


@dataclass(frozen=True, slots=True)
class Estimate:
    """A layout on GPUs of `card` GiB.

    Attributes:
        card: GiB of one GPU, as nvidia-smi and NVML say it.
        memory: GiB of it that CUDA sees.
        usable: GiB that vLLM may take of those.
        stages: first to last.
        pool: what vLLM would report, even where it is too small to start with.
    """

    layout: Layout
    card: float
    memory: float
    usable: float
    stages: tuple[Stage, ...]
    pool: kv.Pool
    host: Host

    @property
    def fits(self) -> bool:
        """Everything but the KV cache fits."""
        return all(stage.total < self.usable for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Of the KV pool; 0 where the rest does not fit."""
        return self.pool.tokens if self.fits else 0

    @property
    def tightest(self) -> int:
        """The index of the stage that leaves the least."""
        return min(range(len(self.stages)), key=lambda one: self.usable - self.stages[one].total)

    def serves(self, concurrency: float = 1.0) -> bool:
        """vLLM starts, and the pool holds that many requests of the whole context."""
        return self.fits and self.pool.starts and self.pool.concurrency >= concurrency

    @property
    def arithmetic(self) -> str:
        """The sum of the tightest stage, for people."""
        stage = self.stages[self.tightest]
        where = f"stage {self.tightest + 1} of " if len(self.stages) > 1 else ""
        summands = " + ".join(f"{size:.1f} {name}" for name, size in stage.parts.items() if size >= 0.05)
        share = f"{round(100 * self.usable / self.memory, 1):g} % of what CUDA sees"
        return (
            f"{where}{self.layout.name}: {summands} = {stage.total:.1f} GiB of {self.usable:.1f} GiB "
            f"({share}, about {self.memory:.2f} of {round(self.card, 2):g} GiB)"
        )


def cuda_sees(card: float) -> float:
    """What CUDA has of a card that has `card` in nvidia-smi, NVML or `--gpu-memory`; not for what torch says, which is CUDA's."""
    return card * CUDA_SEES


def expert_padding(layout: Layout) -> float:
    """How much larger Marlin makes the experts: each GPU's width is rounded up to 128."""
    return max(weights.expert_padding(FLASH, weights.Split(tp, layout.expert_parallel)) for tp in layout.tps)


@lru_cache(maxsize=4096)
def estimate(layout: Layout, card: float, load: Load) -> Estimate:
    """What `layout` takes of GPUs with `card` GiB, as nvidia-smi shows them."""
    seen = cuda_sees(card)
    usable = seen * load.utilization
    spans = kv.stages(load.model, layout.partition)
    parts = [_parts(layout, load, index, layers) for index, layers in enumerate(spans)]
    free = [int((usable - sum(part.values())) * GIB) for part in parts]
    pool = kv.pool(load.model, layout.partition, load.traffic, free)
    stages = tuple(
        Stage(part, layers, tp, size)
        for part, layers, tp, size in zip(parts, spans, layout.tps, pool.block_bytes, strict=True)
    )
    return Estimate(layout, card, seen, usable, stages, pool, _host(layout, load))


def _parts(layout: Layout, load: Load, index: int, layers: range) -> dict[str, float]:
    first, last, tp = index == 0, index == layout.pp - 1, layout.tps[index]
    draft = load.speculative > 0 and last
    split = weights.Split(tp, layout.expert_parallel, load.vision, load.engram_on_gpu, draft)
    served = buffers.Served(load.release, load.sequences, tp, layout.pp, last=last, draft=draft)
    found = weights.stage(load.model, layers, split, first=first, last=last)
    found |= buffers.stage(load.model, layers, load.traffic, served)
    return {name: size / GIB for name, size in found.items()}


def _host(layout: Layout, load: Load) -> Host:
    tables = rounded = 0.0
    for layers, tp in zip(kv.stages(load.model, layout.partition), layout.tps, strict=True):
        for layer in () if load.engram_on_gpu else load.model.engram.layers:
            if layer in layers:
                each, row = load.model.engram, weights.table_bytes(load.model, layer) / tp
                values = row * each.dim / each.row_bytes
                tables += tp * row
                rounded += tp * sum(1 << (int(size) - 1).bit_length() for size in (values, row - values))
    tokens = layout.gpus * (1 << (4 * load.sequences * load.context - 1).bit_length())
    return Host(tables / GIB, rounded / GIB, tokens / GIB)
