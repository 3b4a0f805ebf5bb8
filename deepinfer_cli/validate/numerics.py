"""Runs an op's cases against the oracle, inside a worker: on a GPU, or on a CPU in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from deepinfer_cli.validate.compare import Verdict, compare_outputs, same_bytes, tolerances_of
from deepinfer_cli.validate.model import CaseResult, Level, Status
from deepinfer_cli.validate.tensors import clone_inputs, fingerprint, leaves

REPEATS = 20
SM_COUNTS = (72, 82, 84, 108, 128, 132)


def workloads_of(op: str) -> Any:
    """The payload's workloads module of `op`."""
    return importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")


def run(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Emits `plan` with the case ids, then `start` and `result` per case."""
    level = Level(request["level"])
    interpreted = level is Level.INTERPRETER
    if interpreted:
        from deepinfer_cli.validate import interpreter

        interpreter.install()
    workloads = workloads_of(request["op"])
    cases = {case.id: case for case in workloads.cases(request["suite"])}
    if interpreted:
        cases = {name: case for name, case in cases.items() if not case.gpu_only}
    wanted = [name for name in cases if request["cases"] is None or name in request["cases"]]
    if request["cases"] is None:
        # a worker that takes over from one that died is told which cases are left
        part, parts = request.get("part", (0, 1))
        wanted = wanted[part::parts]
    limit = request.get("max_smem")
    gate = importlib.import_module("deepinfer_sm80.gate")
    languages = request.get("languages", ())
    with gate.assume(smem_limit=limit) if limit is not None else nullcontext():
        if "tilelang" in languages and not interpreted and request.get("threads"):
            compile_tiles(request["op"], gate.device().arch, request["threads"])
        tiles = watch_tiles() if {"triton", "tilelang"} <= set(languages) and not interpreted else None
        emit({"event": "plan", "cases": wanted})
        for name in wanted:
            emit({"event": "start", "case": name})
            result = run_case(workloads, cases[name], level)
            if tiles is not None:
                # an op with kernels in two languages chooses by case
                result.extra["language"] = "tilelang" if tiles else "triton"
                tiles.clear()
            emit({"event": "result", "result": result.to_json()})
            if result.status is Status.RUNTIME_ERROR and not interpreted and not _context_works():
                emit({"event": "restart"})
                return


def compile_tiles(op: str, arch: str, threads: int) -> None:
    """Compiles the op's TileLang variants side by side: the first launches would do it one after the other."""
    variants = importlib.import_module(f"deepinfer_sm80.ops.{op}.tilelang").variants(arch)
    try:
        importlib.import_module("deepinfer_sm80.tile").warm_up(variants, workers=threads)
    except Exception as error:  # the launch that needs it says so again
        sys.stderr.write(f"{op}: a TileLang variant does not compile: {error}\n")


def watch_tiles() -> list[str]:
    """The names of the TileLang kernels that are asked for from now on."""
    tile: Any = importlib.import_module("deepinfer_sm80.tile")
    kernel = tile.kernel
    asked: list[str] = []

    def watched(variant: Any) -> Any:
        asked.append(variant.name)
        return kernel(variant)

    tile.kernel = watched
    return asked


def run_case(workloads: Any, case: Any, level: Level) -> CaseResult:
    """One case; whatever is raised becomes a result."""
    began = time.perf_counter()
    device = "cpu" if level is Level.INTERPRETER else "cuda"
    try:
        short = _too_little_memory(case, device)
        if short:
            return CaseResult(case.id, case.op, level, Status.SKIPPED, short)
        verdict, extra = check_case(workloads, case, device)
    except Exception as error:
        status = Status.COMPILE_ERROR if is_compile_error(error) else Status.RUNTIME_ERROR
        return CaseResult(
            case.id, case.op, level, status, f"{type(error).__name__}: {error}"[:2000],
            duration_s=time.perf_counter() - began, extra={"traceback": traceback.format_exc()[-4000:]},
        )  # fmt: skip
    return CaseResult(
        case.id, case.op, level, Status.PASSED if verdict.ok else Status.FAILED, verdict.reason,
        verdict.max_abs, verdict.max_rel, verdict.matched_ratio, verdict.first_bad,
        time.perf_counter() - began, extra,
    )  # fmt: skip


def _context_works() -> bool:
    """Whether this process can still use the GPU; an illegal access ends that."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Trial:
    """One case after its first, correct run: what the further checks need."""

    workloads: Any
    case: Any
    device: str
    function: Callable[..., Any] | None
    inputs: dict[str, Any]
    got: dict[str, Any]
    want: dict[str, Any]

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Runs the op and waits for it."""
        outputs: dict[str, Any] = self.workloads.run(inputs, self.function)
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return outputs

    def compare(self, outputs: dict[str, Any], want: dict[str, Any] | None = None) -> Verdict:
        """Compares with the oracle."""
        tolerances = tolerances_of(self.workloads, self.case)
        return compare_outputs(outputs, self.want if want is None else want, tolerances)


def check_case(
    workloads: Any, case: Any, device: str, function: Callable[..., Any] | None = None
) -> tuple[Verdict, dict[str, Any]]:
    """Oracle, run, inputs untouched, repeats, other SM counts, graph replay; the first fault decides.

    Args:
        workloads: the op's workloads module.
        case: one of its cases.
        device: `cuda`, or `cpu` for the interpreter.
        function: checked instead of the op, with the op's keyword contract.

    Returns:
        The verdict, and what was done besides comparing once.
    """
    inputs = workloads.make_inputs(case, device)
    want = workloads.expected(case, inputs)
    spare = clone_inputs(inputs)
    before = {name: fingerprint(value) for name, value in leaves(inputs).items()}
    first = Trial(workloads, case, device, function, spare, {}, want)
    got = first.run(inputs)
    verdict = first.compare(got)
    if not verdict.ok:
        return verdict, dict(verdict.figures)
    changed = _changed_inputs(inputs, got, before)
    if changed:
        return dataclasses.replace(verdict, reason=f"inputs were written to: {', '.join(changed)}"), {}
    trial = dataclasses.replace(first, got=got)
    extra: dict[str, Any] = dict(verdict.figures)
    for check in (_repeat, _sweep_sm_counts, _replay_graph) if device == "cuda" else (_sweep_sm_counts,):
        reason, done = check(trial)
        if reason:
            return dataclasses.replace(verdict, reason=reason), extra
        extra.update(done)
    return verdict, extra


def _repeat(trial: Trial) -> tuple[str, dict[str, Any]]:
    for number in range(2, REPEATS + 1):
        again = trial.run(clone_inputs(trial.inputs))
        for name, value in trial.got.items():
            if not same_bytes(again[name], value):
                return f"{name}: run {number} differs from run 1", {}
    return "", {"repeats": REPEATS}


def _sweep_sm_counts(trial: Trial) -> tuple[str, dict[str, Any]]:
    gate = importlib.import_module("deepinfer_sm80.gate")
    # the interpreter is slow: the smallest and the largest card stand for the rest there
    counts = SM_COUNTS if trial.device == "cuda" else (SM_COUNTS[0], SM_COUNTS[-1])
    for count in counts:
        with gate.assume(sm_count=count):
            verdict = trial.compare(trial.run(clone_inputs(trial.inputs)))
        if not verdict.ok:
            return f"with {count} SMs: {verdict.reason}", {}
    return "", {"sm_counts": list(counts)}


def _replay_graph(trial: Trial) -> tuple[str, dict[str, Any]]:
    """Captures the op, replays it, then replays it with other inputs in the same buffers."""
    import torch

    inputs = clone_inputs(trial.inputs)
    other_case = dataclasses.replace(trial.case, name=f"{trial.case.name}+replay")
    other = trial.workloads.make_inputs(other_case, trial.device)
    swap = _replaceable(inputs, other)
    other_want = trial.workloads.expected(other_case, other) if swap else {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        trial.workloads.run(clone_inputs(trial.inputs), trial.function)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = trial.workloads.run(inputs, trial.function)
    graph.replay()
    torch.cuda.synchronize()
    verdict = trial.compare(outputs)
    if verdict.ok and swap:
        fresh = leaves(other)
        for name, value in leaves(inputs).items():
            value.copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        verdict = trial.compare(outputs, other_want)
    done = {"graph": "replayed, also with other inputs" if swap else "replayed with the same inputs"}
    return (f"graph replay: {verdict.reason}", {}) if not verdict.ok else ("", done)


def _replaceable(inputs: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `other` differs from `inputs` in tensor contents alone."""
    mine, its = leaves(inputs), leaves(other)
    if {name: value.shape for name, value in mine.items()} != {
        name: value.shape for name, value in its.items()
    }:
        return False
    plain = {name for name in inputs if name not in {key.partition(".")[0] for key in mine}}
    return all(inputs[name] == other[name] for name in plain)


def _changed_inputs(inputs: dict[str, Any], outputs: dict[str, Any], before: dict[str, Any]) -> list[str]:
    written = {value.untyped_storage().data_ptr() for value in outputs.values()}
    return [
        name
        for name, value in leaves(inputs).items()
        if value.untyped_storage().data_ptr() not in written and fingerprint(value) != before[name]
    ]


def _too_little_memory(case: Any, device: str) -> str:
    if not case.memory_bytes or device != "cuda":
        return ""
    import torch

    free, _total = torch.cuda.mem_get_info()
    # at once: the inputs, the copy they are made from again, the graph's, those it is replayed with, its warm-up's
    needed = 5 * case.memory_bytes
    return f"needs {needed / 2**30:.1f} GiB of free device memory" if free < needed else ""


def is_compile_error(error: BaseException) -> bool:
    """Whether Triton, TileLang or one of their assemblers could not make code for this card."""
    while True:
        kind = type(error)
        if kind.__module__.startswith(("triton.compiler", "tvm.error")) or kind.__name__ in _COMPILE_ERRORS:
            return True
        # TileLang raises what nvcc says as a plain error
        if isinstance(error, RuntimeError) and "Compilation error:" in str(error):
            return True
        following = error.__cause__
        if following is None:
            return False
        error = following


_COMPILE_ERRORS = {"CompilationError", "OutOfResources", "PTXASError"}
