"""`deepinfer verify --e2e`: a small random V4.1 through the installed vLLM's engine, held against itself and stock."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.commands import e2e_table
from deepinfer_cli.detect.gpu import SERVED
from deepinfer_cli.detect.target import Target, TargetKind
from deepinfer_cli.errors import FailedError, UnsupportedError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay import payload
from deepinfer_cli.render import Justify, table
from deepinfer_cli.result import Result
from deepinfer_cli.serve import partition
from deepinfer_cli.validate import runner
from deepinfer_cli.validate.e2e import compare, drive, plan
from deepinfer_cli.validate.forced import forced_arch

# a cold run compiles every kernel first
TIMEOUT_S = 1_200.0
RIGHT: Justify = "right"
_RUNNABLE = "run it on the machine that serves this vLLM, with the interpreter that runs it (--python)"


@dataclass(slots=True)
class Outcome:
    """What the children showed.

    Attributes:
        documents: one for each child (see `drive.document`).
        findings: run's name and comparison.
        not_run: configuration and why.
        notes: what else to know, a sentence each.
    """

    documents: list[dict[str, Any]] = field(default_factory=list)
    findings: list[tuple[str, compare.Finding]] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[tuple[str, compare.Finding]]:
        """The findings that are not well."""
        return [pair for pair in self.findings if not pair[1].ok]


@dataclass(frozen=True, slots=True)
class E2eOptions:
    """What `verify --e2e` was asked to do.

    Attributes:
        target: the vLLM with the overlay, python: the interpreter that serves it.
        full: every configuration, not the default one alone.
        arch: `--arch`: whose code to run on a newer card.
        timeout_s: for one child.
    """

    target: Target
    python: Path
    full: bool = False
    arch: str | None = None
    timeout_s: float = TIMEOUT_S


def run(opts: E2eOptions, out: Output) -> Result:
    """Runs the configurations one after the other and compares.

    Raises:
        UnsupportedError: nothing can run here, and why (`nothing-runnable`).
        FailedError: the interpreter cannot be started.
    """
    overlay = installed(opts.target)
    found = runner.probe(opts.python, _path(opts))
    gpu = gpu_of(opts.python, found)
    capability: tuple[int, int] = (gpu["capability"][0], gpu["capability"][1])
    arch = choose_arch(gpu, opts.arch)
    groups = plan.groups_of(overlay)
    names = tuple(plan.CONFIGURATIONS) if opts.full else plan.DEFAULT
    outcome = Outcome()
    outcome.not_run += [(name, why) for name in names if (why := _why_not(name, gpu, opts.target))]
    names = tuple(name for name in names if name not in dict(outcome.not_run))
    base = plan.Run("", plan.CONFIGURATIONS[names[0]], parent_of(opts), memory_bytes=gpu["memory_bytes"])
    out.note(f"{gpu['name']}: {arch} code{'' if capability in SERVED else ', forced'}; {opts.python}")
    folder = Path(tempfile.mkdtemp(prefix="deepinfer-e2e-"))
    try:
        for tested, other in plan.pairs(names, base, groups, capability, arch):
            _pair(tested, other, groups, opts, folder, outcome, out)
    finally:
        keep = not outcome.documents or bool(outcome.failed)
        if keep:
            out.note(f"the children's logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return _finish(opts, out, arch, outcome)


def _why_not(name: str, gpu: dict[str, Any], target: Target) -> str | None:
    configuration = plan.CONFIGURATIONS[name]
    if configuration.gpus > gpu.get("count", 1):
        return f"it takes {configuration.gpus} GPUs"
    if "pipeline_parallel_size" in configuration.engine:
        return partition.no_stages(target.version or "")
    return None


def installed(target: Target) -> Path:
    """The overlay in `target`.

    Raises:
        UnsupportedError: there is none (`nothing-runnable`).
    """
    folder = target.root / payload.PACKAGE
    if not (folder / "__init__.py").is_file():
        raise _not_runnable("the overlay is not installed in this vLLM", "deepinfer install")
    return folder


def choose_arch(gpu: dict[str, Any], arch: str | None) -> str:
    """The architecture to test on this card: its own, or on a newer one what `--arch` says.

    Raises:
        UnsupportedError: there is none.
    """
    forced, problem = forced_arch(gpu, arch)
    own = SERVED.get((gpu["capability"][0], gpu["capability"][1]))
    if problem:
        how = "leave --arch out" if own else "pass --arch sm80 to run the overlay's sm80 code on this card"
        raise _not_runnable(problem, how)
    return str(forced or own)


def _pair(
    tested: plan.Run,
    other: plan.Run,
    groups: dict[str, str],
    opts: E2eOptions,
    folder: Path,
    outcome: Outcome,
    out: Output,
) -> None:
    document = _child(tested, opts, folder, out)
    outcome.documents.append(document)
    outcome.findings += [(tested.name, finding) for finding in compare.of_run(document)]
    if document["answer"] is None:
        return
    reference = _child(other, opts, folder, out)
    outcome.documents.append(reference)
    if reference["answer"] is None and other.arch is None:
        outcome.notes.append(f"stock vLLM does not run here ({drive.why_failed(reference)})")
        other = plan.enable_only(tested, groups)
        reference = _child(other, opts, folder, out)
        outcome.documents.append(reference)
    outcome.findings += [(tested.name, finding) for finding in compare.against(document, reference)]
    if not reference["complete"]:
        outcome.findings.append((other.name, compare.incomplete(drive.why_failed(reference))))
    elif other.arch is not None:
        outcome.findings += [(other.name, finding) for finding in compare.of_run(reference)]


def _child(run: plan.Run, opts: E2eOptions, folder: Path, out: Output) -> dict[str, Any]:
    with out.progress(None, run.name) as progress:

        def show(run: plan.Run, event: dict[str, Any]) -> None:
            if event["event"] == "step":
                progress.line(f"e2e: {run.name}: {event['step']} ({event['seconds']:.0f} s)")

        try:
            document = drive.run(run, opts.python, folder / run.name, opts.timeout_s, show)
        except OSError as error:
            raise FailedError(f"{opts.python} cannot be started: {error}", code="worker-crashed") from None
    if not document["complete"]:
        out.note(f"{run.name}: {drive.why_failed(document)}")
    return document


def gpu_of(python: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The GPU that the interpreter's torch sees.

    Args:
        found: what it answered (see `runner.probe`).

    Raises:
        UnsupportedError: there is none that can be used, and why (`nothing-runnable`).
    """
    if "problem" in found:
        raise _not_runnable(f"{python} cannot be asked: {found['problem']}", _RUNNABLE)
    for name in ("torch", "triton"):
        if not found.get(name):
            raise _not_runnable(f"{python} has no {name}", _RUNNABLE)
    gpu = found.get("gpu")
    if not gpu:
        raise _not_runnable("torch sees no CUDA GPU here", _RUNNABLE)
    if "problem" in gpu:
        raise _not_runnable(f"torch cannot use the GPU: {gpu['problem']}", _RUNNABLE)
    return dict(gpu)


def _not_runnable(message: str, hint: str) -> UnsupportedError:
    return UnsupportedError(message, code="nothing-runnable", hint=hint)


def parent_of(opts: E2eOptions) -> Path | None:
    """What the child must find first; None where its interpreter finds this vLLM itself."""
    own = opts.target.kind is TargetKind.ENVIRONMENT and opts.target.python == opts.python
    return None if own else opts.target.parent


def _path(opts: E2eOptions) -> tuple[Path, ...]:
    parent = parent_of(opts)
    return (parent,) if parent else ()


def _finish(opts: E2eOptions, out: Output, arch: str, outcome: Outcome) -> Result:
    numbers: list[tuple[str, Justify]] = [(name, RIGHT) for name in ("Prompts", "Mean", "RMS", "p99", "Most")]
    headers: list[str | tuple[str, Justify]] = ["Run", "Check", "Phase", *numbers, "Status"]
    out.table(table(headers, e2e_table.rows(outcome.findings)))
    for document_ in outcome.documents:
        out.line(e2e_table.facts(document_))
    for name, reason in outcome.not_run:
        out.line(f"not run: {name}: {reason}")
    for note in outcome.notes:
        out.line(note)
    for name, finding in outcome.failed:
        where = f" ({finding.length} tokens)" if finding.length else ""
        out.line(f"FAILED {name}: {finding.kind} {finding.phase}{where}: {finding.reason}")
    for document_ in outcome.documents:
        for line in document_["tail"][-15:] if document_["answer"] is None else ():
            out.line(f"  | {line}")
    passed = len(outcome.findings) - len(outcome.failed)
    seconds = sum(float(one["seconds"]) for one in outcome.documents)
    out.line(f"end to end: {passed} passed, {len(outcome.failed)} failed in {seconds:.0f} s")
    return Result("verify", e2e_table.data(opts, arch, outcome), *e2e_table.verdict(outcome))
