"""Measures one op and its baselines, inside a worker: check first, then time in turns on the same inputs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.validate import baselines, environment, timing
from deepinfer_cli.validate.baselines import Provider
from deepinfer_cli.validate.ceiling import MMA, Roofs, mma_rate
from deepinfer_cli.validate.codegen import OVERLAY, Codegen
from deepinfer_cli.validate.compare import compare_outputs, tolerances_of
from deepinfer_cli.validate.compile_gate import variants_of
from deepinfer_cli.validate.model import Status
from deepinfer_cli.validate.numerics import compile_tiles, is_compile_error, workloads_of
from deepinfer_cli.validate.stock import MHC
from deepinfer_cli.validate.tensors import clone_inputs
from deepinfer_cli.validate.turns import Turns

_TIMERS: dict[str, Callable[..., timing.Timer]] = {"graph": timing.GraphTimer, "events": timing.EventTimer}

_LARGE = 2048


@dataclass(frozen=True, slots=True)
class Session:
    """What all cases of one op share.

    Attributes:
        workloads: the op's workloads module.
        codegen: what code was compiled.
        roofs: the measured ceilings.
        arch: the architecture whose code the overlay runs.
        max_smem: limit on shared memory that was asked for; becomes a part of each row's case.
    """

    workloads: Any
    codegen: Codegen
    roofs: Roofs
    arch: str
    max_smem: int | None = None

    def params(self, case: Any) -> dict[str, Any]:
        """The `case` of a row."""
        limit = {} if self.max_smem is None else {"max_smem": self.max_smem}
        return dict(case.params) | limit


def run(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Emits `environment`, `plan`, then `start` and the rows of each case."""
    op, forced = request["op"], request["force_arch"]
    if forced:
        os.environ["DEEPINFER_FORCE_ARCH"] = forced
    workloads = workloads_of(op)
    parent, torch_from = (Path(request[key]) if request[key] else None for key in ("parent", "torch_from"))
    codegen, turns = Codegen(forced), Turns(emit)
    codegen.watch()
    tiled = "tilelang" in request["languages"]
    if tiled:
        codegen.watch_tilelang()
    all_providers = baselines.providers(op, workloads, parent, torch_from, forced=forced is not None)
    providers = [item for item in all_providers if item.name in request["providers"]]
    sizes = request["tokens"]
    cases = {case.id: case for case in workloads.bench_cases() if not sizes or case.params["tokens"] in sizes}
    wanted = [name for name in cases if request["cases"] is None or name in request["cases"]]
    variants = variants_of(op, request["languages"], request["arch"])
    gate = importlib.import_module("deepinfer_sm80.gate")
    limit = request["max_smem"]
    with gate.assume(smem_limit=limit) if limit is not None else nullcontext():
        if tiled:
            with codegen.of(OVERLAY):
                compile_tiles(op, request["arch"], request["threads"])
        with turns.mine():
            roofs = measure_roofs(codegen, request["arch"], any(variant.expects_mma for variant in variants))
        found: dict[str, Any] = {"copy_gb_per_s": round(roofs.copy / 1e9, 1)}
        if roofs.mma:
            found["mma_tflops"] = {request["arch"]: round(roofs.mma / 1e12, 1)}
        emit({"event": "environment", "environment": environment.describe() | found})
        emit({"event": "plan", "cases": wanted})
        session = Session(workloads, codegen, roofs, request["arch"], limit)
        if tiled:
            compile_stock(session, [cases[name] for name in wanted], providers, turns)
        for name in wanted:
            emit({"event": "start", "case": name, "params": session.params(cases[name])})
            with turns.mine():
                rows = bench_case(session, cases[name], providers)
                free_memory()
            for row in rows:
                emit({"event": "row", "row": row})
            emit({"event": "case_done", "case": name})


def measure_roofs(codegen: Codegen, arch: str, with_mma: bool) -> Roofs:
    """The ceilings of this card, that of `mma.sync` only where an op uses it."""
    return Roofs(timing.copy_bandwidth(), mma_rate(arch, codegen.forced) if with_mma else None)


def compile_stock(session: Session, cases: list[Any], providers: list[Provider], turns: Turns) -> None:
    """Calls vLLM's TileLang functions once with each size; while they compile, others use the GPU."""
    baseline = [item for item in providers if item.how == MHC and not item.problem]
    if not baseline:
        return
    turns.while_tilelang_compiles()
    for case in cases:
        if case.params["tokens"] > _LARGE:
            continue  # slow to make, and needs what smaller ones need, or else compiles in its own turn
        with turns.mine():
            inputs = bench_inputs(session.workloads, case)
            for provider in baseline:
                with session.codegen.of(provider.name), contextlib.suppress(Exception):
                    session.workloads.run(inputs, provider.function)
            del inputs
            free_memory()


def free_memory() -> None:
    """Gives what is not used any more back to the card: the next turn is another worker's."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def bench_case(session: Session, case: Any, providers: list[Provider]) -> list[dict[str, Any]]:
    """Result rows of one case, the overlay's first."""
    workloads, codegen = session.workloads, session.codegen
    inputs = bench_inputs(workloads, case)
    want = workloads.expected(case, clone_inputs(inputs))
    sets = timing.input_sets(inputs, workloads.bytes_moved(case))
    failures: dict[str, tuple[Status, str]] = {}
    timers: dict[tuple[str, str], timing.Timer] = {}
    calls: dict[str, timing.Call] = {}
    for provider in providers:
        calls[provider.name] = _caller(workloads, provider)
        with codegen.of(provider.name):
            outcome = check(workloads, case, inputs, provider, want)
            if outcome[0] is Status.PASSED:
                try:
                    for kind in provider.timings:
                        timers[provider.name, kind] = _TIMERS[kind](calls[provider.name], sets)
                except Exception as error:
                    outcome = (Status.RUNTIME_ERROR, f"{type(error).__name__}: {error}"[:500])
        if outcome[0] is not Status.PASSED:
            failures[provider.name] = outcome
            timers = {key: timer for key, timer in timers.items() if key[0] != provider.name}
    del want
    latencies = timing.alternate(timers)
    rows = []
    for provider in providers:
        for kind in provider.timings:
            row = _row(session, case, provider, kind, latencies.get((provider.name, kind)))
            if provider.name in failures:
                status, reason = failures[provider.name]
                row |= {"status": status.value, "reason": reason}
            else:
                row |= _host(provider, calls[provider.name], sets)
            rows.append(row)
    return rows


def bench_inputs(workloads: Any, case: Any) -> dict[str, Any]:
    """The case's inputs; where the baselines make their own outputs, so does the overlay."""
    inputs: dict[str, Any] = workloads.make_inputs(case, "cuda")
    out = inspect.signature(op_function(workloads.OP)).parameters.get("out")
    if out is not None and out.default is None:
        inputs["out"] = None
    return inputs


def op_function(op: str) -> Callable[..., Any]:
    """The op's public function, which has its name, or `build_` before it."""
    module = importlib.import_module(f"deepinfer_sm80.ops.{op}")
    function: Callable[..., Any] = getattr(module, op, None) or getattr(module, f"build_{op}")
    return function


def check(
    workloads: Any, case: Any, inputs: dict[str, Any], provider: Provider, want: dict[str, Any]
) -> tuple[Status, str]:
    """Whether `provider` computes what the oracle does, `want`; what does not is never timed."""
    if provider.problem:
        return Status.SKIPPED, provider.problem
    try:
        got = workloads.run(clone_inputs(inputs), provider.function)
        tolerances = tolerances_of(workloads, case)
        if provider.name != OVERLAY:
            tolerances = baselines.tolerances(workloads.OP, tolerances)
            if hasattr(workloads, "defined"):
                got, want = workloads.defined(got), workloads.defined(want)
        verdict = compare_outputs(got, want, tolerances)
    except Exception as error:
        status = Status.COMPILE_ERROR if is_compile_error(error) else Status.RUNTIME_ERROR
        return status, f"{type(error).__name__}: {error}"[:500]
    return (Status.PASSED, "") if verdict.ok else (Status.FAILED, verdict.reason)


def _caller(workloads: Any, provider: Provider) -> timing.Call:
    if provider.function is not None:
        function = provider.function
        return lambda inputs: function(**inputs)
    op = op_function(workloads.OP)
    return lambda inputs: op(**inputs)


def _host(provider: Provider, call: timing.Call, sets: list[dict[str, Any]]) -> dict[str, float]:
    """`host_us` of a call, with the arguments of a baseline made before; nothing where a wrapper of ours would be timed."""
    if provider.how == MHC:
        return {}
    function = provider.function
    if isinstance(function, baselines.Adapted):
        arguments = [function.arguments(inputs) for inputs in sets[: timing.HOST_CALLS]]
        return {"host_us": timing.host_us(lambda values: function.function(**values), arguments)}
    return {"host_us": timing.host_us(call, sets)}


def _row(
    session: Session, case: Any, provider: Provider, kind: str, latency: dict[str, float] | None
) -> dict[str, Any]:
    moved, flops = session.workloads.bytes_moved(case), session.workloads.flops(case)
    ceiling, seconds = session.roofs.binding(moved, flops)
    row = {
        "op": case.op, "case": session.params(case), "provider": provider.name, "codegen": "native", "timing": kind,
        "latency_us": latency, "bytes": moved, "flops": flops, "ceiling_fraction": None,
        "status": Status.PASSED.value, "arch": session.arch, "ceiling": ceiling, "roof": session.roofs.figure(ceiling),
    }  # fmt: skip
    if latency is not None:
        row["codegen"] = session.codegen.name(provider.name)
        # a card's own code may multiply by other instructions than those of the ceiling
        if (ceiling, row["codegen"]) != (MMA, "native"):
            row["ceiling_fraction"] = round(seconds / (latency["p50"] * 1e-6), 4)
    return row
