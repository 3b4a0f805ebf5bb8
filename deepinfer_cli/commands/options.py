"""Command-line options that several commands share, and the values they carry."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_cli.commands.hints import runnable
from deepinfer_cli.errors import DeepInferError
from deepinfer_cli.output import Output
from deepinfer_cli.result import Result


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Which vLLM is meant."""

    target: Path | None = None
    python: Path | None = None

    @property
    def arguments(self) -> str:
        """The same choice as text for a command in a hint, with a leading space; empty for the default."""
        given = (("--target", self.target), ("--python", self.python))
        return "".join(f" {name} {shlex.quote(str(value))}" for name, value in given if value)


def complete_arch() -> list[str]:
    """Shell completion of `--arch`."""
    from deepinfer_cli.detect.gpu import SERVED

    return list(SERVED.values())


def complete_ops(incomplete: str) -> list[str]:
    """Shell completion of op names, from the manifest: no kernel is imported."""
    from deepinfer_cli.overlay import manifest

    return [op.name for op in manifest.load().ops if op.name.startswith(incomplete)]


def option(*names: str, help: str, **more: Any) -> Any:
    """An option without its default in the help: the text says it."""
    return typer.Option(*names, help=help, show_default=False, **more)


def path_of(text: str) -> Path:
    """A path that is not empty.

    Raises:
        BadParameter: it is.
    """
    # Path("") is the folder one stands in, and an unset variable in a script would mean that
    if not text:
        raise typer.BadParameter("is empty")
    return Path(text)


def path_option(*names: str, help: str, **more: Any) -> Any:
    """An option whose value is a path."""
    return option(*names, help=help, parser=path_of, **more)


def finite(value: float | None) -> float | None:
    """A callback for numbers: neither infinite nor NaN.

    Raises:
        BadParameter: it is.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to go by")
    return value


Target = Annotated[
    Path | None,
    path_option(
        "--target",
        metavar="PATH",
        help="The vLLM to work on: the folder that contains `vllm`, `vllm` itself, or a checkout.",
    ),
]
Python = Annotated[
    Path | None,
    path_option(
        "--python",
        metavar="EXE",
        help="Interpreter whose vLLM is meant, and that checks run in; default: this one.",
    ),
]
Json = Annotated[bool, option("--json", help="Print one JSON document on stdout and nothing else.")]
Quiet = Annotated[bool, option("--quiet", "-q", help="Results, warnings and errors only.")]
Verbose = Annotated[
    int, option("--verbose", "-v", count=True, help="Say more: every file of a plan, every check.")
]
NoColor = Annotated[bool, option("--no-color", help="No colour and no bold (also: NO_COLOR=1).")]
Debug = Annotated[bool, option("--debug", help="Show the Python traceback of an error.")]
DryRun = Annotated[bool, option("--dry-run", help="Show what would be done; write nothing.")]
Yes = Annotated[bool, option("--yes", "-y", help="Do not ask.")]
Force = Annotated[
    bool,
    option("--force", help="Go on where files were edited; a copy of each is kept and its place is printed."),
]
ServeLine = Annotated[
    str | None,
    option("--serve", metavar="LINE", help="A `vllm serve` line to look at for settings that go wrong."),
]
TensorParallel = Annotated[int | None, option("--tp", min=1, metavar="N", help="GPUs of one stage.")]
PipelineParallel = Annotated[int | None, option("--pp", min=1, metavar="N", help="Stages.")]
Partition = Annotated[
    str | None, option("--partition", metavar="LAYERS", help="Layers of each stage, such as 20,20.")
]
Context = Annotated[
    int | None,
    option("--context", min=1, metavar="TOKENS", help="Context length; default: the longest that fits."),
]
Arch = Annotated[
    str | None,
    option(
        "--arch",
        metavar="ARCH",
        autocompletion=complete_arch,
        help="Install for sm80, sm86 or sm89 instead of this machine's GPU (container builds).",
    ),
]
Partial = Annotated[
    bool,
    option("--partial", help="Install the ops whose vLLM symbols all match; leave the others to stock."),
]
Wheel = Annotated[
    str | None,
    option(
        "--wheel",
        metavar="VERSION",
        help="Fetch this vLLM release with pip (about 340 MB) and install into it.",
    ),
]
Into = Annotated[
    Path | None,
    path_option(
        "--into",
        metavar="DIR",
        help="Where --wheel unpacks it: a new or empty folder, or one that holds it already.",
    ),
]
ClearCaches = Annotated[
    bool,
    option(
        "--clear-caches",
        help="Also remove compile caches (Triton, TileLang, torch.compile, vLLM) after showing them.",
    ),
]
NoVerify = Annotated[bool, option("--no-verify", help="Skip the child process that checks what is bound.")]
PatchFile = Annotated[
    Path | None, path_option("--output", "-o", metavar="FILE", help="Write the patch here, not to stdout.")
]
Overwrite = Annotated[bool, option("--force", help="Write over what is there.")]
IntoFolder = Annotated[Path, path_option("--into", metavar="DIR", help="A new or empty folder.")]
CONTAINER_ROOT = "/usr/local/lib/python3.12/dist-packages/vllm"
ContainerRoot = Annotated[
    str,
    typer.Option(
        "--container-root",
        metavar="PATH",
        help="Where vLLM is inside the image (this is the official image's).",
    ),
]
Service = Annotated[
    str, typer.Option("--service", metavar="NAME", help="The compose service that runs vLLM.")
]
OpsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="OPS", autocompletion=complete_ops, help="Ops; default: all."),
]
Ops = Annotated[str, option("--ops", metavar="A,B", help="The same, separated by commas.")]
Level = Annotated[
    list[str] | None,
    option(
        "--level", metavar="LEVEL", help="static, compile, interpreter, numerics or live; may be repeated."
    ),
]
Suite = Annotated[str | None, option("--suite", metavar="SUITE", help="smoke or full; default: smoke.")]
EndToEnd = Annotated[
    bool, option("--e2e", help="Run a small random V4.1 through vLLM's engine instead; needs no checkpoint.")
]
Full = Annotated[bool, option("--full", help="With --e2e, every configuration.")]
Case = Annotated[str | None, option("--case", metavar="ID", help="One case alone.")]
VerifyArch = Annotated[
    str | None,
    option(
        "--arch",
        metavar="ARCH",
        autocompletion=complete_arch,
        help="Build for sm80, sm86 or sm89 alone, and run its code on a newer card.",
    ),
]
MaxSmem = Annotated[
    int | None,
    option(
        "--max-smem", metavar="BYTES", min=1, help="Only kernel variants that take no more shared memory."
    ),
]
Timeout = Annotated[
    float | None,
    option("--timeout", metavar="SECONDS", min=0.001, callback=finite, help="For one case; default 300."),
]
OutputFile = Annotated[
    Path | None, path_option("--output", "-o", metavar="FILE", help="Also write the JSON document here.")
]
TorchFrom = Annotated[
    Path | None,
    path_option(
        "--torch-from",
        metavar="PATH",
        help="A vLLM 0.30.0 tree, whose PyTorch function is the `torch` baseline.",
    ),
]
Provider = Annotated[
    list[str] | None,
    option(
        "--provider",
        metavar="NAME",
        help="overlay, stock, stock-sm80, stock-0.30-grid or torch; may be repeated.",
    ),
]
RowsFile = Annotated[
    Path | None, path_option("--output", "-o", metavar="FILE", help="Write the result file here.")
]
Baseline = Annotated[
    Path | None,
    path_option("--baseline", metavar="FILE", help="An earlier result file; a regression is exit code 1."),
]
Threshold = Annotated[
    float | None,
    option(
        "--threshold",
        metavar="SHARE",
        min=0,
        callback=finite,
        help="How much slower than the baseline is a regression; default 0.10.",
    ),
]


def names(positional: list[str] | None, listed: str) -> tuple[str, ...]:
    """Op names from arguments and from a comma-separated option."""
    return tuple(
        dict.fromkeys([*(positional or ()), *(name.strip() for name in listed.split(",") if name.strip())])
    )


def examples(*lines: str) -> str:
    """The examples at the end of a command's help, line by line."""
    return "Examples:\n\n\b\n" + "\n".join(f"  {line}" for line in lines)


def run(
    command: Callable[[Any, Output], Result],
    options: Any,
    json: bool,
    quiet: bool,
    verbose: int,
    no_color: bool,
) -> int:
    """Runs a command with its own output, prints its result and gives the exit code."""
    out = Output(json=json, quiet=quiet, verbose=verbose, color=not no_color)
    where, arch = options.where, getattr(options, "arch", None)
    partial = getattr(options, "partial", False)
    if getattr(options, "wheel", None):
        where = TargetOptions(options.into, where.python)
    out.complete = lambda text: runnable(text, where, arch, partial=partial)
    try:
        result = command(options, out)
    except DeepInferError as error:
        error.hint = error.hint and out.complete(error.hint)
        raise
    out.emit(result.completed(out.complete))
    out.check()
    return int(result.exit_code)
