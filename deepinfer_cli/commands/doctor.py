"""`deepinfer doctor`: what this machine and its vLLM have, row by row, with what to do about it, and how to serve."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.commands import common, doctor_machine, doctor_serve, doctor_settings
from deepinfer_cli.commands.doctor_row import Row
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect.cuda import interpreter
from deepinfer_cli.detect.gpu import detect_gpus
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import DeepInferError, ExitCode
from deepinfer_cli.output import Output
from deepinfer_cli.render import plural, table
from deepinfer_cli.result import ErrorItem, Result
from deepinfer_cli.serve import layout, line
from deepinfer_cli.serve.advice import Advice


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What `doctor` was asked to do.

    Attributes:
        where: which vLLM.
        serve: a `vllm serve` line, or the options of one, to look at.
        tp: GPUs of a stage, to look at.
        pp: stages, to look at.
        partition: layers of each stage, to look at.
        context: context length to serve; default the longest that fits.
    """

    where: TargetOptions = field(default_factory=TargetOptions)
    serve: str | None = None
    tp: int | None = None
    pp: int | None = None
    partition: str | None = None
    context: int | None = None


def run(opts: DoctorOptions, out: Output) -> Result:
    """Runs every check; one that breaks is a row, not the end.

    Raises:
        UsageError: `serve` holds no serve line, or the model is not made for such a context.
    """
    layout.check_context(opts.context)
    if opts.serve is not None:
        line.parse(opts.serve)
    gpus = detect_gpus()
    rows = _guarded("GPU", lambda: doctor_machine.gpu_rows(gpus))
    rows += _guarded("driver", lambda: doctor_machine.driver_rows(gpus))
    target = None
    try:
        from deepinfer_cli.detect.vllm import find_target

        target = find_target(target=opts.where.target, python=opts.where.python)
    except DeepInferError as error:
        rows.append(Row("vLLM", "problem", error.message, error.hint or ""))
    except OSError as error:
        rows.append(Row("vLLM", "problem", f"{error.filename}: {error.strerror or error}", "its permissions"))
    found = _ask(target, rows)
    if target is not None:
        rows += _guarded("vLLM", lambda: doctor_machine.vllm_rows(target))
        rows += _guarded("packages", lambda: doctor_machine.package_rows(target, found, gpus))
        rows += _guarded("overlay", lambda: doctor_machine.overlay_rows(target, opts.where))
        rows += _guarded("running", lambda: doctor_machine.running_rows(target))
        rows += _guarded("disk", lambda: doctor_machine.disk_rows(target))
    rows += _guarded("nvcc", lambda: doctor_machine.nvcc_rows(found))
    rows += _guarded("caches", doctor_machine.cache_rows)
    rows += _guarded("switches", lambda: doctor_settings.switch_rows(target))
    if target is not None:
        rows += _guarded("kernels", lambda: doctor_settings.kernel_rows(target, gpus))
    asked = doctor_serve.Asked(opts.serve, opts.tp, opts.pp, opts.partition, opts.context)
    rows += _guarded("settings", lambda: doctor_settings.setting_rows(target, asked))
    advice: list[Advice] = []
    rows += _guarded("serving", lambda: doctor_serve.advice_rows(target, gpus, asked, advice))
    return _report(out, rows, gpus_data=common.gpu_data(gpus), target=target, advice=advice)


def _ask(target: Target | None, rows: list[Row]) -> dict[str, Any]:
    """What the target's interpreter has; a row where it does not answer."""
    python = (target.python if target else None) or Path(sys.executable)
    try:
        return interpreter(python) | {"path": str(python)}
    except Exception as error:
        rows.append(Row("packages", "note", f"could not be checked: {error}"))
        return {}


def _guarded(name: str, probe: Callable[[], Iterable[Row]]) -> list[Row]:
    try:
        return list(probe())
    except Exception as error:
        return [Row(name, "note", f"could not be checked: {error}")]


def _report(
    out: Output, rows: list[Row], *, gpus_data: dict[str, Any], target: Target | None, advice: list[Advice]
) -> Result:
    out.table(
        table(("Check", "Status", "Value", "Hint"), ((r.check, r.status, r.value, r.hint) for r in rows))
    )
    bad = [row for row in rows if row.status == "problem"]
    noted = sum(row.status == "note" for row in rows)
    if advice and advice[0].line:
        out.line(advice[0].line)
    out.line(", ".join((plural(len(rows), "check"), plural(len(bad), "problem"), plural(noted, "note"))))
    data = {
        "checks": [asdict(row) for row in rows],
        "gpu": gpus_data,
        "target": target and common.target_data(target),
        "serve": doctor_serve.advice_data(advice[0]) if advice else None,
    }
    errors = tuple(
        ErrorItem("doctor-check", f"{row.check}: {row.value}", row.hint or None) for row in bad if out.json
    )
    return Result("doctor", data, ExitCode.FAILED if bad else ExitCode.OK, errors)
