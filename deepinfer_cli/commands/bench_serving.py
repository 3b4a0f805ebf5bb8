"""`deepinfer bench --serving`: two vLLM servers, with the accelerate ops and without, under the same traffic."""

from __future__ import annotations

import json
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli import outfile
from deepinfer_cli.commands import e2e as e2e_command
from deepinfer_cli.commands import serving_table, verify
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.arch import arch_name
from deepinfer_cli.errors import DeepInferError, ExitCode, Interruption, UnsupportedError, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay.signals import interruptible, shielded
from deepinfer_cli.render import joined
from deepinfer_cli.result import ErrorItem, Result
from deepinfer_cli.validate import runner, switches
from deepinfer_cli.validate.e2e import plan as e2e
from deepinfer_cli.validate.serving import document, drive, plan, text

_SEEDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What `bench --serving` was asked to do.

    Attributes:
        where: which vLLM; `python` also names the interpreter that serves it.
        serve_arguments: what follows `--`: arguments of `vllm serve`.
        endpoints: `--endpoint`, twice: running servers.
        logs: `--logs DIR`; a new temporary folder if left out. It is kept.
        run_timeout_s: `--timeout SECONDS` for one run.

    The others are `plan.Request`'s.
    """

    where: TargetOptions = field(default_factory=TargetOptions)
    serve_arguments: tuple[str, ...] = ()
    model: str | None = None
    small: bool = False
    endpoints: tuple[str, ...] = ()
    together: bool = False
    rounds: int = 1
    runs: int = plan.REPEATS
    input_tokens: tuple[int, ...] | None = None
    streams: tuple[int, ...] = plan.STREAMS
    output_tokens: int | None = None
    prompts: Path | None = None
    text: Path | None = None
    port: int | None = None
    seed: int | None = None
    start_timeout_s: float = 3_600.0
    run_timeout_s: float = 1_800.0
    arch: str | None = None
    output: Path | None = None
    logs: Path | None = None


def run(opts: ServingOptions, out: Output) -> Result:
    """Measures, shows, and writes the result file.

    Raises:
        UsageError: options that do not go together, a port in use.
        UnsupportedError: no vLLM, no overlay or no GPU.
        FailedError: a server did not come up, or the client cannot run.
        Interruption: Ctrl-C or SIGTERM; every process has been ended.
    """
    _check(opts)
    text.check(opts.prompts, opts.text)
    if opts.output is not None:
        outfile.check(opts.output)
    request, found = _endpoints(opts, out) if opts.endpoints else _servers(opts, out)
    plan.check(request)
    folder = _folder(opts)
    out.note(f"logs and raw results are kept in {folder}")
    out.note(_order(request))
    with interruptible(), out.progress(None, "bench --serving") as progress:
        work = drive.Drive(request, folder, progress.say)
        try:
            measured = work.run()
        except KeyboardInterrupt as error:
            left = work.measured.left
            with shielded():
                if work.measured.outcomes:
                    _write(opts, out, request, work.measured, found)
            state = (
                f"process {joined(map(str, left))} could not be ended"
                if left
                else "nothing of it runs any more"
            )
            raise Interruption(
                f"interrupted; {state}", code="interrupted", hint=f"logs and raw results are in {folder}"
            ) from error
        except drive.ServerError as error:
            _show_tail(error, out)
            raise
    return _finish(opts, out, request, measured, found)


def _check(opts: ServingOptions) -> None:
    asked = [name for name, given in (
        ("--model", opts.model and not opts.endpoints), ("--small", opts.small), ("--endpoint", opts.endpoints),
    ) if given]  # fmt: skip
    if len(asked) != 1:
        what = f"{asked[0]} and {asked[1]} do not go together" if asked else "there is nothing to serve"
        raise UsageError(
            what, code="usage", hint="pass --model MODEL, --small, or --endpoint URL twice; arguments of "
            "`vllm serve` follow --",
        )  # fmt: skip
    if opts.endpoints and len(opts.endpoints) != 2:
        raise UsageError(
            "--endpoint is needed twice: one server on each side",
            code="usage",
            hint="--endpoint A --endpoint B",
        )
    if opts.endpoints:
        given = {
            "--together": opts.together,
            "--rounds": opts.rounds > 1,
            "--port": opts.port,
            "--arch": opts.arch,
        }
        extra = [name for name, value in given.items() if value] + list(opts.serve_arguments[:1])
        if extra:
            raise UsageError(
                f"{extra[0]} is for servers that are started here, and --endpoint names running ones",
                code="usage",
            )
    if opts.together and opts.rounds > 1:
        raise UsageError("--rounds is for servers that take turns, and --together starts both", code="usage")


def _request(opts: ServingOptions, python: Path, parent: Path | None, **more: Any) -> plan.Request:
    return plan.Request(
        python=python, parent=parent, model=opts.model, small=opts.small, extra=opts.serve_arguments,
        input_lengths=opts.input_tokens or (plan.SMALL_INPUT_LENGTHS if opts.small else plan.INPUT_LENGTHS),
        output_tokens=opts.output_tokens or (plan.SMALL_OUTPUT_TOKENS if opts.small else plan.OUTPUT_TOKENS),
        streams=opts.streams, repeats=opts.runs, rounds=opts.rounds, together=opts.together,
        # a server that has seen a prompt has it in its cache: every measurement has its own
        seed=secrets.randbelow(_SEEDS) if opts.seed is None else opts.seed,
        prompts=opts.prompts, text=opts.text, port=opts.port, start_timeout_s=opts.start_timeout_s,
        run_timeout_s=opts.run_timeout_s, **more,
    )  # fmt: skip


def _endpoints(opts: ServingOptions, out: Output) -> tuple[plan.Request, dict[str, Any]]:
    """Two running servers; a vLLM is needed for its benchmark alone."""
    target = verify.find_target(opts.where, out)
    python = verify.interpreter(opts.where, target, out)
    parent = None if target is None else e2e_command.parent_of(e2e_command.E2eOptions(target, python))
    sides = [
        plan.Side(name, base_url=url.rstrip("/").removesuffix("/v1"))
        for name, url in zip(plan.ENDPOINTS, opts.endpoints, strict=True)
    ]
    found = runner.probe(python, (parent,) if parent else ())
    return _request(opts, python, parent, sides=(sides[0], sides[1])), found


def _servers(opts: ServingOptions, out: Output) -> tuple[plan.Request, dict[str, Any]]:
    """The target, with all ops and without those that only make it faster."""
    target = verify.find_target(opts.where, out)
    if target is None or target.layout is None:
        raise UnsupportedError(
            "there is no vLLM with DeepSeek-V4.1 to serve",
            code="nothing-runnable",
            hint="name one with --target",
        )
    installed = e2e_command.installed(target)
    set_ = switches.read(installed)
    if set_.disabled:
        raise UsageError(
            "DEEPINFER_DISABLE is on: both servers would be stock",
            code="usage",
            hint="unset DEEPINFER_DISABLE",
        )
    python = verify.interpreter(opts.where, target, out)
    wanted = e2e_command.E2eOptions(target, python)
    parent = e2e_command.parent_of(wanted)
    found = runner.probe(python, (parent,) if parent else ())
    gpu = e2e_command.gpu_of(python, found)
    arch = e2e_command.choose_arch(gpu, arch_name(opts.arch) if opts.arch else set_.forced)
    off = tuple(sorted({*set_.ops, *e2e.accelerating(e2e.groups_of(installed))}))
    sides = (plan.Side(plan.OVERLAY, set_.ops), plan.Side(plan.ENABLE_ONLY, off))
    native = tuple(gpu["capability"]) == e2e.CAPABILITIES[arch]
    out.note(f"{gpu['name']}: {arch} code{'' if native else ', forced'}; {python}")
    request = _request(
        opts, python, parent, sides=sides, arch=arch, generate=not native, memory_bytes=gpu["memory_bytes"]
    )
    return request, found | {"payload": str(installed)}


def _folder(opts: ServingOptions) -> Path:
    if opts.logs is None:
        return Path(tempfile.mkdtemp(prefix="deepinfer-serving-"))
    folder = opts.logs.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty", code="usage", hint="name a new folder with --logs")
    except OSError as error:
        raise outfile.failed(error, folder) from error
    return folder


def _order(request: plan.Request) -> str:
    """What is compared in which order, and what that is worth."""
    if not request.started:
        return "the runs of both endpoints alternate"
    if request.together:
        return "both servers run at once, and their runs alternate"
    if request.rounds > 1:
        return f"the servers take turns, {request.rounds} rounds: what drifts meanwhile shows in the spread"
    return (
        "each server is started once, and one is measured after the other: what drifts meanwhile (clocks, "
        "temperature) looks like a difference; --rounds or --together tell it apart"
    )


def _show_tail(error: DeepInferError, out: Output) -> None:
    for line in getattr(error, "log_tail", ()):
        out.warn(f"log | {line}")


def _write(
    opts: ServingOptions, out: Output, request: plan.Request, measured: drive.Measured, found: dict[str, Any]
) -> dict[str, Any]:
    made = document.build(request, measured, found)
    if opts.output is not None:
        outfile.write(opts.output, (json.dumps(made, indent=1) + "\n").encode())
        out.note(f"written to {opts.output}")
    return made


def _finish(
    opts: ServingOptions, out: Output, request: plan.Request, measured: drive.Measured, found: dict[str, Any]
) -> Result:
    made = _write(opts, out, request, measured, found)
    for content in serving_table.tables(made["rows"]):
        out.table(content)
    for line in serving_table.lines(made):
        out.line(line)
    return Result("bench", made, *_verdict(request, measured, made, out))


def _verdict(
    request: plan.Request, measured: drive.Measured, made: dict[str, Any], out: Output
) -> tuple[ExitCode, tuple[ErrorItem, ...]]:
    errors = [
        ErrorItem(
            "overlay-not-live", why, "the comparison says nothing of the overlay; the server's log says more"
        )
        for why in drive.misled(request, measured)
    ]
    errors += [
        ErrorItem("run-failed", f"{row['provider']}: {serving_table.what(row)}: {row['reason']}")
        for row in made["rows"]
        if row["status"] != "PASSED"
    ]
    if measured.problem is not None:
        _show_tail(measured.problem, out)
        one = measured.problem
        errors.append(ErrorItem(one.code, one.message, one.hint, one.paths))
    if measured.left:
        errors.append(
            ErrorItem("processes-left", f"process {joined(map(str, measured.left))} could not be ended")
        )
    return (ExitCode.FAILED if errors else ExitCode.OK), tuple(errors)
