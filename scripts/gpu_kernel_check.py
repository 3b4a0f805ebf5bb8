"""Check and tune the kernels on a GPU machine that has only torch and triton.

    python scripts/gpu_kernel_check.py [--only check|tune] [--output FILE]

Ampere code (`TRITON_OVERRIDE_ARCH=sm80`) on whatever card is present. `check` runs every case of both ops: bit-exact
against the oracle, twenty equal repeats, other SM counts, graph replay with other inputs. `tune` times launch settings
by graph replay, inputs rotated past L2, against the bandwidth of a copy. The exit code is 0 if every check passed; a
short table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TRITON_OVERRIDE_ARCH", "sm80")
os.environ.setdefault("DEEPINFER_FORCE_ARCH", "sm80")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlays")]

import torch  # noqa: E402
import triton  # noqa: E402
from deepinfer_sm80.ops.combine import combine  # noqa: E402
from deepinfer_sm80.ops.combine import triton as combine_kernel  # noqa: E402
from deepinfer_sm80.ops.combine import workloads as combine_workloads  # noqa: E402
from deepinfer_sm80.ops.gather import gather  # noqa: E402
from deepinfer_sm80.ops.gather import triton as gather_kernel  # noqa: E402
from deepinfer_sm80.ops.gather import workloads as gather_workloads  # noqa: E402

from deepinfer_cli.validate import compare, numerics, tensors, timing  # noqa: E402
from deepinfer_cli.validate.model import Level, Status  # noqa: E402


def main() -> int:
    """Check, then tune, then print what matters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("check", "tune"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    failed: list[str] = []
    rows: list[dict[str, Any]] = []
    if options.only != "tune":
        failed = check()
    if options.only != "check":
        ceiling = timing.copy_bandwidth()
        rows = [
            *tune(gather_workloads, gather_settings(), ceiling),
            *tune(combine_workloads, combine_settings(), ceiling),
        ]
    if options.output:
        options.output.write_text(json.dumps({"failed": failed, "rows": rows}, indent=1), encoding="utf-8")
    summary(rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"failed: {failed}")
    return 1 if failed else 0


def check() -> list[str]:
    """Runs every case; returns the ids of those that did not pass."""
    failed = []
    for workloads in (gather_workloads, combine_workloads):
        for case in workloads.cases("full"):
            result = numerics.run_case(workloads, case, Level.NUMERICS)
            print(f"{result.status.value} {case.id} {result.duration_s:.1f}s {result.reason}", flush=True)
            if result.status is not Status.PASSED:
                failed.append(case.id)
                print(result.first_bad, str(result.extra.get("traceback", ""))[-1500:], flush=True)
            torch.cuda.empty_cache()
    return failed


def gather_settings() -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function with the op's keywords) for each launch setting of gather."""
    yield "launched", gather
    for rows, load_bytes, num_warps in (
        (4, 8, 2), (4, 8, 4), (8, 8, 2), (8, 8, 4), (16, 8, 2), (16, 8, 4), (16, 8, 8), (32, 8, 4), (32, 8, 8),
        (8, 16, 2), (8, 16, 4), (16, 16, 2), (16, 16, 4), (32, 16, 8),
    ):  # fmt: skip
        variant = gather_kernel._variant("", rows, load_bytes, 16, num_warps)
        for programs in (16, 64) if (rows, load_bytes, num_warps) == (16, 8, 4) else (32,):
            yield (
                f"rows={rows} load={load_bytes} warps={num_warps} programs={programs}",
                replaced(gather, pick=lambda *_, v=variant: v, MAX_PROGRAMS_PER_SM=programs),
            )


def combine_settings() -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function with the op's keywords) for each launch setting of combine."""
    yield "launched", combine
    settings = ((128, 1), (256, 1), (256, 2), (512, 1), (512, 4), (1024, 1), (1024, 2), (1024, 4), (1024, 8))
    for columns, num_warps in settings:
        variant = combine_kernel._variant("", columns, 4, num_warps)
        yield (
            f"columns={columns} warps={num_warps}",
            replaced(combine, pick=lambda *_, v=variant: v),
        )


def replaced(function: Callable[..., Any], **attributes: Any) -> Callable[..., Any]:
    """`function`, called while its kernel module has other attributes."""
    module = gather_kernel if function is gather else combine_kernel

    def call(**kwargs: Any) -> Any:
        with mock.patch.multiple(module, **attributes):
            return function(**kwargs)

    return call


def tune(
    workloads: Any, settings: Iterator[tuple[str, Callable[..., Any]]], ceiling: float
) -> list[dict[str, Any]]:
    """Times all settings of an op on its benchmark cases; a setting that is wrong is left out, and said so."""
    functions = dict(settings)
    rows = []
    for case in workloads.bench_cases():
        began = time.perf_counter()
        inputs = workloads.make_inputs(case, "cuda")
        want = workloads.expected(case, inputs)
        sets = timing.input_sets(inputs, workloads.bytes_moved(case))
        timers: dict[Any, timing.Timer] = {}
        for name, function in functions.items():
            got = workloads.run(tensors.clone_inputs(inputs), function)
            verdict = compare.compare_outputs(got, want, workloads.TOLERANCES)
            if not verdict.ok:
                print(f"WRONG {case.id} {name}: {verdict.reason}", flush=True)
                continue
            timers[name] = timing.GraphTimer(partial(workloads.run, function=function), sets)
        for name, latency in timing.alternate(timers).items():
            fraction = workloads.bytes_moved(case) / (latency["p50"] * 1e-6) / ceiling
            rows.append(
                {
                    "case": case.id,
                    "setting": name,
                    "latency_us": latency,
                    "ceiling_fraction": round(fraction, 3),
                }
            )
        host = timing.host_us(workloads.run, sets)
        print(f"{case.id}: host {host} us, {len(sets)} sets, {time.perf_counter() - began:.0f}s", flush=True)
        del sets, inputs, want, timers, got
        torch.cuda.empty_cache()
    print(f"copy: {ceiling / 1e9:.0f} GB/s", flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> None:
    """What is launched and the five best settings, for each case."""
    for case in dict.fromkeys(row["case"] for row in rows):
        ours = [row for row in rows if row["case"] == case]
        best = sorted(ours, key=lambda row: row["latency_us"]["p50"])[:5]
        for row in [row for row in ours if row["setting"] == "launched"] + best:
            print(
                f"{case}\t{row['latency_us']['p50']:.2f} us\t{row['ceiling_fraction']:.0%}\t{row['setting']}"
            )


if __name__ == "__main__":
    sys.exit(main())
