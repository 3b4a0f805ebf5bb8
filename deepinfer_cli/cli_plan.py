"""The command line of `deepinfer plan`; what it does is imported when it runs."""

from __future__ import annotations

from deepinfer_cli.commands import options as o
from deepinfer_cli.commands import plan_options as p

EXAMPLES = o.examples(
    "deepinfer plan --gpus 8 --gpu-memory 80",
    "deepinfer plan --gpus 8 --gpu-memory 48 --context 262144 --concurrency 3 --chart plan.svg",
    "deepinfer plan --gpu-memory 64 --layout tp2pp3 --partition 14,14,12",
)


def plan(
    target: o.Target = None,
    python: o.Python = None,
    gpus: p.Gpus = None,
    gpu_memory: p.GpuMemory = None,
    host_memory: p.HostMemory = None,
    vllm: p.Release = None,
    context: o.Context = None,
    concurrency: p.Concurrency = 1.0,
    speculative_tokens: p.Speculative = 5,
    max_num_batched_tokens: p.Batched = 8192,
    max_num_seqs: p.Sequences = 256,
    gpu_memory_utilization: p.Utilization = 0.92,
    engram: p.Engram = "host",
    vision: p.Vision = True,
    block_size: p.BlockSize = 128,
    expert_parallel: p.ExpertParallel = None,
    layout: p.LayoutName = None,
    partition: o.Partition = None,
    chart: p.Chart = None,
    check: p.Check = True,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Say which layouts some GPUs can serve, and what each takes.

    Feasible TP x PP layouts with their partitions, memory by part, the KV pool, host memory, what is refused and why, and the
    `vllm serve` line of the best. Needs no GPU. Exit code 3 when nothing fits.
    """
    from deepinfer_cli.commands import plan as command
    from deepinfer_cli.commands.plan_request import PlanOptions
    from deepinfer_cli.serve.memory import Load

    load = Load(
        concurrency=concurrency,
        batched_tokens=max_num_batched_tokens,
        sequences=max_num_seqs,
        speculative=speculative_tokens,
        utilization=gpu_memory_utilization,
        engram_on_gpu=engram == "gpu",
        vision=vision,
        block_size=block_size,
    )
    options = PlanOptions(
        o.TargetOptions(target, python), gpus, gpu_memory, host_memory, vllm, context, load, layout, partition,
        expert_parallel, chart, check,
    )  # fmt: skip
    return o.run(command.run, options, json, quiet, verbose, no_color)
