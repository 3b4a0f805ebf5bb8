"""The command line: every verb's options, and which command they go to. Commands are imported when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from deepinfer_cli.cli_export import export_app
from deepinfer_cli.commands import options as o
from deepinfer_cli.commands import plan_options as p
from deepinfer_cli.commands import serving_options as s

app = typer.Typer(
    name="deepinfer",
    help="Make DeepSeek-V4.1 run on Ampere GPUs with the vLLM you already have, and take every byte back.",
    epilog="Examples:\n\n\b\n  deepinfer doctor\n  deepinfer install --dry-run\n  deepinfer install\n"
    "  deepinfer verify\n  deepinfer rollback",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(export_app, name="export")


def _version(value: bool) -> None:
    if value:
        from deepinfer_cli import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog=o.examples(
        "deepinfer install --dry-run",
        "deepinfer install --python /opt/venv/bin/python --yes",
        "deepinfer install --wheel 0.33.0 --into DIR --arch sm80 --yes",
    )
)
def install(
    target: o.Target = None,
    python: o.Python = None,
    arch: o.Arch = None,
    partial: o.Partial = False,
    wheel: o.Wheel = None,
    into: o.Into = None,
    clear_caches: o.ClearCaches = False,
    no_verify: o.NoVerify = False,
    dry_run: o.DryRun = False,
    yes: o.Yes = False,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Put the overlay into a vLLM, in one transaction.

    Shows the plan and asks before it writes. What it writes, `deepinfer rollback` takes back byte for byte.
    """
    from deepinfer_cli.commands import install as command

    options = command.InstallOptions(
        where=o.TargetOptions(target, python),
        arch=arch,
        dry_run=dry_run,
        yes=yes,
        force=force,
        partial=partial,
        wheel=wheel,
        into=into,
        clear_caches=clear_caches,
        verify=not no_verify,
    )
    return o.run(command.run, options, json, quiet, verbose, no_color)


@app.command(epilog=o.examples("deepinfer rollback --dry-run", "deepinfer rollback --yes"))
def rollback(
    target: o.Target = None,
    python: o.Python = None,
    dry_run: o.DryRun = False,
    yes: o.Yes = False,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Take the overlay out again, byte for byte.

    Every file, mode and folder listing is as before the install.
    Needs the record beside vLLM and nothing else: no network, no GPU, no git.
    """
    from deepinfer_cli.commands import rollback as command

    options = command.RollbackOptions(o.TargetOptions(target, python), dry_run=dry_run, yes=yes, force=force)
    return o.run(command.run, options, json, quiet, verbose, no_color)


@app.command(epilog=o.examples("deepinfer status", "deepinfer status --target DIR --json"))
def status(
    target: o.Target = None,
    python: o.Python = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Show vLLM, GPU and overlay in one screen.

    Exit code 1 when files were modified, vLLM was reinstalled since, or a transaction is unfinished.
    """
    from deepinfer_cli.commands import status as command

    options = command.StatusOptions(o.TargetOptions(target, python))
    return o.run(command.run, options, json, quiet, verbose, no_color)


@app.command(
    epilog=o.examples(
        "deepinfer verify",
        "deepinfer verify gather --level compile --arch sm86",
        "deepinfer verify --suite full",
        "deepinfer verify --e2e",
    )
)
def verify(
    ops: o.OpsArgument = None,
    target: o.Target = None,
    python: o.Python = None,
    op: o.Ops = "",
    level: o.Level = None,
    suite: o.Suite = None,
    case: o.Case = None,
    arch: o.VerifyArch = None,
    max_smem: o.MaxSmem = None,
    e2e: o.EndToEnd = False,
    full: o.Full = False,
    timeout: o.Timeout = None,
    output: o.OutputFile = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Prove the installed overlay on this machine.

    Runs the levels this machine allows, from files on disk to kernels on the GPU, and says which it could not.
    """
    from deepinfer_cli.commands import verify as command

    options = command.VerifyOptions(
        where=o.TargetOptions(target, python),
        ops=o.names(ops, op),
        levels=tuple(level or ()),
        suite=suite,
        case=case,
        arch=arch,
        max_smem=max_smem,
        timeout_s=timeout,
        output=output,
        e2e=e2e,
        full=full,
    )
    return o.run(command.run, options, json, quiet, verbose, no_color)


@app.command(
    epilog=o.examples(
        "deepinfer bench",
        "deepinfer bench gather --output rows.json --baseline old.json",
        "deepinfer bench --serving --model MODEL --output serving.json -- --tensor-parallel-size 8",
        "deepinfer bench --serving --endpoint http://a:8000 --endpoint http://b:8000",
    )
)
def bench(
    ops: o.OpsArgument = None,
    target: o.Target = None,
    python: o.Python = None,
    op: o.Ops = "",
    arch: o.VerifyArch = None,
    max_smem: o.MaxSmem = None,
    torch_from: o.TorchFrom = None,
    provider: o.Provider = None,
    output: o.RowsFile = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = None,
    timeout: o.Timeout = None,
    serving: s.Serving = False,
    model: s.Model = None,
    small: s.Small = False,
    endpoint: s.Endpoint = None,
    together: s.Together = False,
    rounds: s.Rounds = 1,
    runs: s.Runs = None,
    input_tokens: s.InputTokens = None,
    streams: s.Streams = None,
    output_tokens: s.OutputTokens = None,
    prompts: s.Prompts = None,
    text: s.ScoredText = None,
    port: s.Port = None,
    seed: s.Seed = None,
    start_timeout: s.StartTimeout = None,
    logs: s.Logs = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Measure the overlay against stock vLLM and PyTorch.

    All in one run on this machine's GPU; a case that is not correct is not timed.
    With --serving, two servers under vLLM's own benchmark: all ops on, and the accelerate ops off.
    """
    served = s.given(
        model, small, endpoint, together, rounds, runs, input_tokens, streams, output_tokens, prompts, text, port, seed,
        start_timeout, logs,
    )  # fmt: skip
    if serving:
        s.refuse({"--ops": op, "--max-smem": max_smem, "--torch-from": torch_from, "--provider": provider,
                  "--baseline": baseline, "--threshold": threshold}, "does not go with --serving")  # fmt: skip
        from deepinfer_cli.commands import bench_serving
        from deepinfer_cli.commands.serving_request import ServingOptions

        where = o.TargetOptions(target, python)
        asked = ServingOptions(
            where, tuple(ops or ()), arch=arch, output=output, **served, **s.run_timeout(timeout)
        )
        return o.run(bench_serving.run, asked, json, quiet, verbose, no_color)
    s.refuse(served, "goes with --serving")
    from deepinfer_cli.commands import bench as command

    options = command.BenchOptions(
        where=o.TargetOptions(target, python),
        ops=o.names(ops, op),
        arch=arch,
        max_smem=max_smem,
        torch_from=torch_from,
        providers=tuple(provider or ()),
        output=output,
        baseline=baseline,
        threshold=threshold,
        **({} if timeout is None else {"timeout_s": timeout}),
    )
    return o.run(command.run, options, json, quiet, verbose, no_color)


@app.command(
    epilog=o.examples(
        "deepinfer doctor",
        "deepinfer doctor --tp 4 --partition 20,20",
        "deepinfer doctor --serve 'vllm serve MODEL -tp 8 --block-size 64'",
    )
)
def doctor(
    target: o.Target = None,
    python: o.Python = None,
    serve: o.ServeLine = None,
    tp: o.TensorParallel = None,
    pp: o.PipelineParallel = None,
    partition: o.Partition = None,
    context: o.Context = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Check this machine and say how to serve on it.

    Driver, GPUs, vLLM and its packages, nvcc, disk, caches, overlay, kernels, settings, and a `vllm serve` line for these GPUs.
    Exit code 1 when a row is a problem.
    """
    from deepinfer_cli.commands import doctor as command

    options = command.DoctorOptions(o.TargetOptions(target, python), serve, tp, pp, partition, context)
    return o.run(command.run, options, json, quiet, verbose, no_color)


@app.command(
    epilog=o.examples(
        "deepinfer plan --gpus 8 --gpu-memory 80",
        "deepinfer plan --gpus 8 --gpu-memory 48 --context 262144 --concurrency 4 --chart plan.svg",
        "deepinfer plan --gpu-memory 64 --layout tp2pp3 --partition 14,14,12",
    )
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
