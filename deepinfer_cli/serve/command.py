"""The `vllm serve` line of a layout."""

from __future__ import annotations

import json
import shlex
from typing import Any

from deepinfer_cli.serve import memory, partition
from deepinfer_cli.serve.memory import Layout, Load

MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"


def serve_line(layout: Layout, load: Load, *, huge_pages: bool = False) -> str:
    """The command, for vLLM 0.30 to 0.33; what is not vLLM's default is said, and what must not change by itself.

    Args:
        huge_pages: Engram's tables in transparent huge pages, which are not rounded up to a power of two.
    """
    options: list[tuple[str, str | None]] = [("--tensor-parallel-size", str(layout.tp))]
    if layout.pp > 1:
        options.append(("--pipeline-parallel-size", str(layout.pp)))
    if layout.expert_parallel:
        options.append(("--enable-expert-parallel", None))
    options += [
        ("--block-size", str(load.block_size)),
        ("--kv-cache-dtype", "fp8"),
        ("--moe-backend", "marlin"),
        ("--max-model-len", str(load.context)),
        ("--max-num-batched-tokens", str(load.batched_tokens)),
        *([("--max-num-seqs", str(load.sequences))] if load.sequences != memory.SEQUENCES else []),
        ("--gpu-memory-utilization", f"{load.utilization:g}"),
        ("--engram-config", json.dumps(_engram(load, huge_pages))),
    ]
    if not load.vision:
        options.append(("--limit-mm-per-prompt", json.dumps({"image": 0})))
    if load.speculative:
        drafted = {"method": "dspark", "num_speculative_tokens": load.speculative}
        options.append(("--speculative-config", json.dumps(drafted)))
    words = [word for name, value in options for word in (name, value) if word is not None]
    before = f"{partition.VARIABLE}={partition.text(layout.partition)} " if layout.pp > 1 else ""
    return before + shlex.join(["vllm", "serve", MODEL, *words])


def _engram(load: Load, huge_pages: bool) -> dict[str, Any]:
    found = {"cpu_offload": not load.engram_on_gpu}
    return found | {"use_thp": True} if huge_pages and not load.engram_on_gpu else found
