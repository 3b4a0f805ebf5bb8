"""Command-line options of `deepinfer plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from deepinfer_cli.commands.options import option, path_option


def _positive(value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value:g} is no number above 0")
    return value


Placement = Literal["host", "gpu"]
Gpus = Annotated[
    int | None, option("--gpus", min=1, metavar="N", help="GPUs; default: this machine's SM8x cards.")
]
GpuMemory = Annotated[
    float | None,
    option(
        "--gpu-memory",
        metavar="GIB",
        callback=_positive,
        help="GiB of one: nvidia-smi's MiB / 1,024; default: this machine's.",
    ),
]
HostMemory = Annotated[
    float | None,
    option(
        "--host-memory",
        metavar="GIB",
        callback=_positive,
        help="GiB of the host; default: this one's, with its cards.",
    ),
]
Release = Annotated[
    str | None,
    option("--vllm", metavar="RELEASE", help="0.30.0 to 0.33.0; default: the target's, else 0.33.0."),
]
Concurrency = Annotated[
    float,
    option(
        "--concurrency",
        metavar="N",
        callback=_positive,
        help="Requests of the whole context at once; default 1.",
    ),
]
Speculative = Annotated[
    int,
    option("--speculative-tokens", min=0, metavar="K", help="DSpark's tokens a step, 0 without; default 5."),
]
Batched = Annotated[
    int, option("--max-num-batched-tokens", min=1, metavar="N", help="Tokens of one step; default 8192.")
]
Sequences = Annotated[
    int, option("--max-num-seqs", min=1, metavar="N", help="Sequences at once; default 256, as in vLLM.")
]
Utilization = Annotated[
    float,
    option(
        "--gpu-memory-utilization",
        metavar="SHARE",
        callback=_positive,
        help="vLLM's share of what CUDA sees of a card; default 0.92.",
    ),
]
Engram = Annotated[
    Placement, option("--engram", help="Where Engram's tables are: host (default) or gpu.", metavar="PLACE")
]
Vision = Annotated[bool, option("--vision/--no-vision", help="With the image encoder (default), or without.")]
BlockSize = Annotated[
    int,
    option("--block-size", min=32, metavar="N", help="Tokens of a block; default 128, which SM8x needs."),
]
ExpertParallel = Annotated[
    bool | None,
    option(
        "--expert-parallel/--no-expert-parallel",
        help="Whole experts on each GPU, or slices of all; default: both are tried.",
    ),
]
LayoutName = Annotated[
    str | None, option("--layout", metavar="NAME", help="Explain one: tp8, tp2pp3, pp6, tp2+tp4.")
]
Chart = Annotated[
    Path | None,
    path_option(
        "--chart",
        metavar="FILE",
        help="Draw memory by part and the pools: FILE.png or FILE.svg.",
    ),
]
Check = Annotated[
    bool,
    option(
        "--check/--no-check",
        help="Hold the pool against the target vLLM's own planner, where there is one; default.",
    ),
]
