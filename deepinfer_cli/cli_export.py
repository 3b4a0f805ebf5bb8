"""The command line of `deepinfer export patch|tree|docker`."""

from __future__ import annotations

from typing import Any

import typer

from deepinfer_cli.commands import options as o

export_app = typer.Typer(
    help="Write the overlay as a patch, files or mounts.",
    epilog="Examples:\n\n\b\n  deepinfer export patch --output sm80.patch\n  deepinfer export tree --into overlay\n"
    "  deepinfer export docker --into mounts",
    rich_markup_mode=None,
)


@export_app.command("patch", epilog=o.examples("deepinfer export patch --output sm80.patch"))
def export_patch(
    target: o.Target = None,
    python: o.Python = None,
    output: o.PatchFile = None,
    partial: o.Partial = False,
    force: o.Overwrite = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Write a patch for `git apply`, to stdout or a file."""
    where = o.TargetOptions(target, python)
    return _export(
        json, quiet, verbose, no_color, form="patch", where=where, output=output, partial=partial, force=force
    )


@export_app.command("tree", epilog=o.examples("deepinfer export tree --into overlay"))
def export_tree(
    into: o.IntoFolder,
    target: o.Target = None,
    python: o.Python = None,
    partial: o.Partial = False,
    force: o.Overwrite = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Write the edited and added files to a folder, for `cp -r`."""
    where = o.TargetOptions(target, python)
    return _export(
        json, quiet, verbose, no_color, form="tree", where=where, into=into, partial=partial, force=force
    )


@export_app.command("docker", epilog=o.examples("deepinfer export docker --target DIR --into mounts"))
def export_docker(
    into: o.IntoFolder,
    target: o.Target = None,
    python: o.Python = None,
    container_root: o.ContainerRoot = o.CONTAINER_ROOT,
    service: o.Service = "vllm",
    partial: o.Partial = False,
    force: o.Overwrite = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Write per-file read-only mounts: a compose file and `docker run` options.

    Never a mount of the whole vLLM folder: that would hide its shared libraries.
    """
    where = o.TargetOptions(target, python)
    return _export(
        json,
        quiet,
        verbose,
        no_color,
        form="docker",
        where=where,
        into=into,
        partial=partial,
        force=force,
        container_root=container_root,
        service=service,
    )


def _export(json: bool, quiet: bool, verbose: int, no_color: bool, **values: Any) -> int:
    from deepinfer_cli.commands import export as command

    options = command.ExportOptions(**values)
    return o.run(command.run, options, json, quiet, verbose, no_color)
