"""The command line: every verb's options, and which command they go to. Commands are imported when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from deepinfer_cli import cli_bench, cli_plan
from deepinfer_cli.cli_export import export_app
from deepinfer_cli.commands import options as o

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


app.command(epilog=cli_bench.EXAMPLES)(cli_bench.bench)


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


app.command(epilog=cli_plan.EXAMPLES)(cli_plan.plan)
