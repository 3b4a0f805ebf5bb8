"""Measures one op and its baselines, inside a worker: check first, then time in turns on the same inputs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.validate import baselines, environment, timing
from deepinfer_cli.validate.baselines import OVERLAY, Provider
from deepinfer_cli.validate.compare import compare_outputs, tolerances_of
from deepinfer_cli.validate.compile_gate import LIMITS
from deepinfer_cli.validate.model import Status
from deepinfer_cli.validate.numerics import is_compile_error, workloads_of
from deepinfer_cli.validate.tensors import clone_inputs

_TIMERS: dict[str, Callable[..., timing.Timer]] = {"graph": timing.GraphTimer, "events": timing.EventTimer}


@dataclass(slots=True)
class Codegen:
    """Which architecture's code Triton made, for the overlay and for everything else."""

    arch: str | None
    seen: dict[str, set[str]] = field(default_factory=dict)
    _now: str = ""

    def watch(self) -> None:
        """Listens to Triton's compiler from now on."""
        import triton

        before = triton.knobs.compilation.listener

        def listen(**event: Any) -> None:
            if before is not None:
                before(**event)
            self.seen.setdefault(self._now, set()).add(_compiled_for(event))

        triton.knobs.compilation.listener = listen

    @contextmanager
    def of(self, provider: str) -> Iterator[None]:
        """Within it kernels are compiled for `provider`: forced code for the overlay, the card's own for others."""
        self._now = OVERLAY if provider == OVERLAY else "baseline"
        if self._now == OVERLAY and self.arch:
            os.environ["TRITON_OVERRIDE_ARCH"] = self.arch
        try:
            yield
        finally:
            os.environ.pop("TRITON_OVERRIDE_ARCH", None)

    def name(self, provider: str) -> str:
        """`sm80` and the like, or `native`, from the code that was found.

        Raises:
            RuntimeError: the overlay's kernels are not, or not all, what was asked for.
        """
        found = self.seen.get(OVERLAY if provider == OVERLAY else "baseline", set())
        if provider != OVERLAY:
            return next(iter(found)) if len(found) == 1 and found <= set(LIMITS) else "native"
        if len(found) != 1 or (self.arch and found != {self.arch}):
            raise RuntimeError(
                f"the overlay's kernels were compiled for {sorted(found)}, not for {self.arch}"
            )
        return next(iter(found))


def _compiled_for(event: dict[str, Any]) -> str:
    """The architecture in the compiled kernel itself; its metadata would only repeat what was asked for."""
    paths = [Path(path) for name, path in event["metadata_group"].items() if name.endswith(".ttgir")]
    text = paths[0].read_text() if paths else ""
    for arch in LIMITS:
        if f'"cuda:{arch[2:]}"' in text:
            return arch
    return "native" if '"cuda:' in text else "unknown"


def run(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Emits `environment`, `plan`, then `start` and the rows of each case."""
    op, arch = request["op"], request["force_arch"]
    if arch:
        os.environ["DEEPINFER_FORCE_ARCH"] = arch
    workloads = workloads_of(op)
    parent, torch_from = (Path(request[key]) if request[key] else None for key in ("parent", "torch_from"))
    all_providers = baselines.providers(op, workloads, parent, torch_from)
    providers = [item for item in all_providers if item.name in request["providers"]]
    codegen = Codegen(arch)
    codegen.watch()
    copy = timing.copy_bandwidth()
    emit(
        {
            "event": "environment",
            "environment": environment.describe() | {"copy_gb_per_s": round(copy / 1e9, 1)},
        }
    )
    cases = {case.id: case for case in workloads.bench_cases()}
    wanted = [name for name in cases if request["cases"] is None or name in request["cases"]]
    emit({"event": "plan", "cases": wanted})
    for name in wanted:
        emit({"event": "start", "case": name, "params": dict(cases[name].params)})
        for row in bench_case(workloads, cases[name], providers, codegen, copy):
            emit({"event": "row", "row": row})
        emit({"event": "case_done", "case": name})


def bench_case(
    workloads: Any, case: Any, providers: list[Provider], codegen: Codegen, copy: float
) -> list[dict[str, Any]]:
    """Result rows of one case, the overlay's first."""
    inputs = bench_inputs(workloads, case)
    sets = timing.input_sets(inputs, workloads.bytes_moved(case))
    failures: dict[str, tuple[Status, str]] = {}
    timers: dict[tuple[str, str], timing.Timer] = {}
    calls: dict[str, timing.Call] = {}
    for provider in providers:
        calls[provider.name] = _caller(workloads, provider)
        with codegen.of(provider.name):
            outcome = check(workloads, case, inputs, provider)
            if outcome[0] is Status.PASSED:
                try:
                    for kind in provider.timings:
                        timers[provider.name, kind] = _TIMERS[kind](calls[provider.name], sets)
                except Exception as error:
                    outcome = (Status.RUNTIME_ERROR, f"{type(error).__name__}: {error}"[:500])
        if outcome[0] is not Status.PASSED:
            failures[provider.name] = outcome
            timers = {key: timer for key, timer in timers.items() if key[0] != provider.name}
    latencies = timing.alternate(timers)
    rows = []
    for provider in providers:
        for kind in provider.timings:
            row = _row(workloads, case, provider, kind, codegen, latencies.get((provider.name, kind)), copy)
            if provider.name in failures:
                status, reason = failures[provider.name]
                row |= {"status": status.value, "reason": reason}
            else:
                row["host_us"] = timing.host_us(calls[provider.name], sets)
            rows.append(row)
    return rows


def bench_inputs(workloads: Any, case: Any) -> dict[str, Any]:
    """The case's inputs; where the baselines make their own outputs, so does the overlay."""
    inputs: dict[str, Any] = workloads.make_inputs(case, "cuda")
    if "out" in inputs and "out" not in workloads.call_kwargs(inputs, baselines.STOCK):
        inputs["out"] = None
    return inputs


def check(workloads: Any, case: Any, inputs: dict[str, Any], provider: Provider) -> tuple[Status, str]:
    """Whether `provider` computes what the oracle does; what does not is never timed."""
    if provider.problem:
        return Status.SKIPPED, provider.problem
    try:
        mine = clone_inputs(inputs)
        want = workloads.expected(case, mine)
        got = workloads.run(mine, provider.function)
        verdict = compare_outputs(got, want, tolerances_of(workloads, case))
    except Exception as error:
        status = Status.COMPILE_ERROR if is_compile_error(error) else Status.RUNTIME_ERROR
        return status, f"{type(error).__name__}: {error}"[:500]
    return (Status.PASSED, "") if verdict.ok else (Status.FAILED, verdict.reason)


def _caller(workloads: Any, provider: Provider) -> timing.Call:
    if provider.function is not None:
        function = provider.function
        return lambda inputs: function(**inputs)
    op = getattr(importlib.import_module(f"deepinfer_sm80.ops.{workloads.OP}"), workloads.OP)
    return lambda inputs: op(**inputs)


def _row(
    workloads: Any, case: Any, provider: Provider, kind: str, codegen: Codegen,
    latency: dict[str, float] | None, copy: float,
) -> dict[str, Any]:  # fmt: skip
    moved = workloads.bytes_moved(case)
    row = {
        "op": case.op, "case": dict(case.params), "provider": provider.name, "codegen": "native", "timing": kind,
        "latency_us": latency, "bytes": moved, "flops": workloads.flops(case), "ceiling_fraction": None,
        "status": Status.PASSED.value,
    }  # fmt: skip
    if latency is not None:
        row["codegen"] = codegen.name(provider.name)
        row["ceiling_fraction"] = round(moved / (latency["p50"] * 1e-6) / copy, 4)
    return row
