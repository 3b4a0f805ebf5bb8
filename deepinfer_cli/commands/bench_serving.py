"""`deepinfer bench --serving`: two vLLM servers, with the accelerate ops and without, under the same traffic."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from deepinfer_cli import outfile
from deepinfer_cli.commands import serving_request, serving_table
from deepinfer_cli.commands.serving_request import ServingOptions
from deepinfer_cli.errors import DeepInferError, ExitCode, Interruption, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay.signals import interruptible, shielded
from deepinfer_cli.render import joined
from deepinfer_cli.result import ErrorItem, Result
from deepinfer_cli.validate.serving import document, drive, plan, text


def run(opts: ServingOptions, out: Output) -> Result:
    """Measures, shows, and writes the result file.

    Raises:
        UsageError: options that do not go together, a setting that would not start, a port in use.
        UnsupportedError: no vLLM, no overlay or no GPU.
        FailedError: a server did not come up or does not answer, or the client cannot run.
        Interruption: Ctrl-C or SIGTERM; every process has been ended.
    """
    serving_request.check(opts)
    text.check(opts.prompts, opts.text)
    if opts.output is not None:
        outfile.check(opts.output)
    request, found = (
        serving_request.of_endpoints(opts, out) if opts.endpoints else serving_request.of_servers(opts, out)
    )
    plan.check(request)
    drive.check(request)
    there = opts.logs is not None and opts.logs.exists()
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
            state = _left(left) if left else "nothing of it runs any more"
            kept = _keep(folder, there)
            hint = f"logs and raw results are in {folder}" if kept else None
            raise Interruption(f"interrupted; {state}", code="interrupted", hint=hint) from error
        except DeepInferError as error:
            _show_tail(error, out)
            if work.measured.left:
                out.warn(_left(work.measured.left))
            _keep(folder, there)
            raise
    return _finish(opts, out, request, measured, found)


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


def _keep(folder: Path, there: bool) -> bool:
    """Whether anything was started that has a log; where not, `folder` is as it was before."""
    if any(folder.rglob("*.log")):
        return True
    for path in folder.iterdir():
        shutil.rmtree(path)
    if not there:
        folder.rmdir()
    return False


def _left(processes: list[int]) -> str:
    return f"process {joined(map(str, processes))} could not be ended"


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
        for why in document.misled(request, measured)
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
        errors.append(ErrorItem("processes-left", _left(measured.left)))
    return (ExitCode.FAILED if errors else ExitCode.OK), tuple(errors)
