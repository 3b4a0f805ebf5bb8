"""What an end-to-end run does: engine settings, phases and environment, as data.

A `Run` is one engine in one child. `configurations` are the settings that `verify --e2e` offers, and
`default_runs` pairs each with what it is held against.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepinfer_cli.overlay import manifest
from deepinfer_cli.validate.e2e.model import DRAFT_TOKENS, ModelOptions, weight_bytes

GIB = 1 << 30
# beside the weights: CUDA and its libraries, a step's activations, logits of scored prompts, graphs
_WORKING_BYTES = 7 * GIB
# what several children on one card are given for their KV cache, whatever vLLM would measure beside the others
SHARED_KV_BYTES = 1 * GIB
CAPABILITIES = {"sm80": (8, 0), "sm86": (8, 6), "sm89": (8, 9)}

# around the window of 128, around the Top-K of 512 in layers of ratio 1 and 2, and several chunks
EDGES = (7, 127, 128, 129, 130, 511, 512, 513, 1_023, 1_024, 1_026, 1_500, 3_000, 5_000)
SHORT_EDGES = (7, 127, 130, 513, 1_500, 3_000, 5_000)
FAR = 262_144

# their stock kernels do not compile for SM8x, so nothing runs there without ours
NEEDED = frozenset({"gather", "sparse_decode"})


@dataclass(frozen=True, slots=True)
class Configuration:
    """Engine settings and phases.

    Attributes:
        what: in words, for the table.
        model: which small model.
        engine: keyword arguments of vLLM's `LLM`, besides those that every run has.
        phases: what to do with it, in order (see `phases`).
        gpus: how many it takes.
        env: variables of the child.
    """

    what: str
    model: ModelOptions = field(default_factory=ModelOptions)
    engine: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[Mapping[str, Any], ...] = ()
    gpus: int = 1
    env: Mapping[str, str] = field(default_factory=dict)


def _phases(lengths: tuple[int, ...], *, chunks: tuple[int, ...] = (700,)) -> tuple[dict[str, Any], ...]:
    """Prompts in mixed batches, other chunk sizes, a served prompt, a shared prefix."""
    return (
        {"name": "prompts", "do": "generate", "lengths": list(lengths), "tokens": 16},
        *({"name": f"chunks of {chunk}", "do": "score", "of": "prompts", "chunk": chunk} for chunk in chunks),
        {
            "name": "served",
            "do": "generate",
            "lengths": [100, 600, 1_700, 2_900],
            "tokens": 8,
            "seed": 2,
            "plain": True,
        },
        {"name": "prefix", "do": "prefix", "shared": 1_537, "own": 60, "tokens": 8},
    )


_GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
}
_DRAFT: dict[str, Any] = {"speculative_config": {"method": "dspark", "num_speculative_tokens": DRAFT_TOKENS}}
# reductions over NVLink multicast are not what is tested, and a fault in them can take a whole host's GPUs with it
_NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
_TIMES: dict[str, Any] = {
    "name": "times", "do": "time", "prefill": 8_000, "batches": [1, 8], "steps": 64, "context": 1_500,
}  # fmt: skip

CONFIGURATIONS: dict[str, Configuration] = {
    "graphs": Configuration(
        "CUDA graphs, Engram, mixed batches, chunks of 2048 and 700, prefix cache",
        engine=_GRAPHS,
        phases=(*_phases(SHORT_EDGES), _TIMES),
    ),
    "eager": Configuration(
        "eager, Engram, prompts across every edge, chunks of 2048, 700 and 130",
        phases=_phases(EDGES, chunks=(700, 130)),
    ),
    "draft": Configuration(
        "CUDA graphs, Engram, DSpark with five tokens",
        model=ModelOptions(draft=True),
        engine={
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [6, 12, 24, 48]},
            **_DRAFT,
        },
        phases=_phases(SHORT_EDGES, chunks=()),
    ),
    "plain": Configuration(
        "eager without Engram", model=ModelOptions(engram=False), phases=_phases(SHORT_EDGES)
    ),
    "long": Configuration(
        f"a prompt of {FAR} tokens",
        model=ModelOptions(positions=1_048_576),
        engine={"max_model_len": FAR + 128, "max_num_batched_tokens": 4_096, "max_num_seqs": 2},
        phases=({"name": "far", "do": "far", "length": FAR, "tokens": 8},),
    ),
    "tp2": Configuration(
        "two GPUs, tensor parallel",
        engine={"tensor_parallel_size": 2},
        phases=_phases(SHORT_EDGES),
        gpus=2,
        env=_NO_MULTICAST,
    ),
    # the cut before layer 4, a KV source, is one of the few that V4.1 allows
    "pp2": Configuration(
        "two GPUs, pipeline of four and four layers",
        engine={"pipeline_parallel_size": 2},
        phases=_phases(SHORT_EDGES),
        gpus=2,
        env={**_NO_MULTICAST, "VLLM_PP_LAYER_PARTITION": "4,4"},
    ),
}
DEFAULT = ("graphs",)


@dataclass(frozen=True, slots=True)
class Run:
    """One child.

    Attributes:
        name: also its folder's name.
        configuration: what it does.
        parent: folder to put first on the child's path; None where its interpreter finds vLLM itself.
        arch: the architecture whose kernels are bound: the card's own, unless `generate`; None binds nothing (stock).
        off_switch: without `arch`, whether it is `DEEPINFER_DISABLE` that binds nothing; else the card decides.
        generate: Triton generates code for `arch` and vLLM sees its capability, on a newer card.
        off: ops left to stock.
        memory_bytes: of the GPU.
        kv_bytes: fixed KV cache, for children that share a card; None lets vLLM measure.
        plugin: a script's module that plants faults.
        bytecode: whether it may leave bytecode beside the sources.
    """

    name: str
    configuration: Configuration
    parent: Path | None = None
    arch: str | None = None
    generate: bool = False
    off_switch: bool = True
    off: tuple[str, ...] = ()
    memory_bytes: int = 24 * 10**9
    kv_bytes: int | None = None
    plugin: Path | None = None
    bytecode: bool = False

    def request(self, out: Path) -> dict[str, Any]:
        """The child's request; everything it writes goes to the folder `out`."""
        return {
            "parent": str(self.parent) if self.parent else None,
            "out": str(out),
            "model_dir": str(out / "model"),
            "model": self.configuration.model.to_json(),
            "engine": self.engine(),
            "capability": list(CAPABILITIES[self.arch]) if self.arch and self.generate else None,
            "phases": [dict(phase) for phase in self.configuration.phases],
            "plugin": str(self.plugin) if self.plugin else None,
        }

    def engine(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `LLM`."""
        given = dict(self.configuration.engine)
        settings: dict[str, Any] = {
            "skip_tokenizer_init": True, "enforce_eager": True, "seed": 0, "max_model_len": 8_192,
            "max_num_batched_tokens": 2_048, "max_num_seqs": 16, "enable_prefix_caching": True,
            "limit_mm_per_prompt": {"image": 0}, "gpu_memory_utilization": self.utilization(),
        }  # fmt: skip
        if self.kv_bytes is not None:
            settings["kv_cache_memory_bytes"] = self.kv_bytes
        return settings | given

    def utilization(self) -> float:
        """The share of the GPU's memory that the model's bytes need; no more, so that it starts beside others."""
        wanted = weight_bytes(self.configuration.model) + _WORKING_BYTES
        return round(min(0.92, wanted / self.memory_bytes), 4)

    def environment(self, given: Mapping[str, str] | None = None) -> dict[str, str]:
        """The child's variables: the given ones (this process's), less those that would decide what it tests."""
        given = os.environ if given is None else given
        env = {name: value for name, value in given.items() if not name.startswith(_DECIDING)}
        env.update(_SETTINGS)
        env.update(self.configuration.env)
        if self.parent is not None:
            # also for the processes that vLLM starts to look at the model
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.parent), env.get("PYTHONPATH")]))
        if not self.bytecode:
            env["PYTHONDONTWRITEBYTECODE"] = "1"
        if self.arch is None and self.off_switch:
            env["DEEPINFER_DISABLE"] = "1"
        if self.arch is not None and self.generate:
            # on a card of that architecture the overlay must find it out itself
            env["DEEPINFER_FORCE_ARCH"] = env["TRITON_OVERRIDE_ARCH"] = self.arch
        if self.off:
            env["DEEPINFER_DISABLE_OPS"] = ",".join(sorted(self.off))
        return env


_DECIDING = ("DEEPINFER_", "TRITON_OVERRIDE_ARCH", "TRITON_INTERPRET", "VLLM_PP_LAYER_PARTITION")
_SETTINGS = {
    # the engine in the child's own process: its scheduler and model can be reached
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "true",
}


def groups_of(root: Path) -> dict[str, str]:
    """Op → `enable` or `accelerate`, of the ops of the payload at `root` that can be switched off."""
    return {op.name: op.group for op in manifest.load(root / "manifest.toml").ops if op.replaces}


def accelerating(groups: Mapping[str, str]) -> tuple[str, ...]:
    """The ops to switch off for the enable group alone.

    Args:
        groups: op → `enable` or `accelerate`.
    """
    return tuple(
        sorted(name for name, group in groups.items() if group == "accelerate" and name not in NEEDED)
    )


def stock_runs(capability: tuple[int, int]) -> bool:
    """Whether stock vLLM runs V4.1 on this card: from Hopper on."""
    return capability >= (9, 0)


def without_pipeline(configuration: Configuration) -> Configuration:
    """The same on one GPU where it is a pipeline: vLLM 0.33 starts none of V4.1 (see the binding of `kv_cache_planning`)."""
    if "pipeline_parallel_size" not in configuration.engine:
        return configuration
    engine = {name: value for name, value in configuration.engine.items() if name != "pipeline_parallel_size"}
    return replace(configuration, engine=engine, gpus=1, env={})


def enable_only(tested: Run, groups: Mapping[str, str]) -> Run:
    """The same run without the ops that only make it faster."""
    name = f"{tested.name.removesuffix('-overlay')}-enable-only"
    return replace(tested, name=name, off=accelerating(groups))


def pairs(
    names: Iterable[str], base: Run, groups: Mapping[str, str], capability: tuple[int, int], arch: str
) -> list[tuple[Run, Run]]:
    """For each configuration the run under test and the one that it is held against.

    Where stock runs, that is stock in the card's own code; elsewhere the enable group alone.

    Args:
        names: of `CONFIGURATIONS`.
        base: interpreter's path, memory and so on, for all.
        capability: the card's own.
        arch: whose kernels are tested.
    """
    native = capability == CAPABILITIES[arch]
    found = []
    for name in names:
        configuration = CONFIGURATIONS[name]
        tested = replace(
            base, name=f"{name}-overlay", configuration=configuration, arch=arch, generate=not native
        )
        if stock_runs(capability):
            alone = without_pipeline(configuration)
            other = replace(base, name=f"{name}-stock", configuration=alone, arch=None, generate=False)
        else:
            other = enable_only(tested, groups)
        found.append((tested, other))
    return found
