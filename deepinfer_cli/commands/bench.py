"""`deepinfer bench`: the overlay against stock vLLM and PyTorch, in one run on this machine's GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepinfer_cli import outfile
from deepinfer_cli.commands import pairs
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.commands.verify import check_choice, find_target, interpreter, payload_root
from deepinfer_cli.detect.arch import arch_name
from deepinfer_cli.errors import ExitCode
from deepinfer_cli.output import Output
from deepinfer_cli.render import Justify, Table, plural, table
from deepinfer_cli.result import ErrorItem, Result
from deepinfer_cli.validate import bench, ops, results

RIGHT: Justify = "right"
_THRESHOLD = 0.10
_HARMLESS = {"PASSED", "SKIPPED"}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `bench` was asked to do.

    Attributes:
        where: which vLLM; `python` also names the interpreter the kernels run in.
        ops: positional OPS and `--ops a,b`; empty means all.
        arch: `--arch` sm80, sm86 or sm89: measures its code on a newer card.
        torch_from: `--torch-from PATH`, a vLLM 0.30.0 tree whose PyTorch function is a baseline.
        providers: `--provider`, repeatable: overlay, stock, stock-sm80, stock-0.30-grid, torch; empty means
            all.
        output: `--output FILE`, the result file.
        baseline: `--baseline FILE`, an earlier result file to compare with.
        threshold: `--threshold SHARE`, how much slower than it is a regression; None means 0.10.
        timeout_s: `--timeout SECONDS` for one case.
        max_smem: `--max-smem BYTES`, only kernel variants that take no more shared memory.
    """

    where: TargetOptions = field(default_factory=TargetOptions)
    ops: tuple[str, ...] = ()
    arch: str | None = None
    torch_from: Path | None = None
    providers: tuple[str, ...] = ()
    output: Path | None = None
    baseline: Path | None = None
    threshold: float | None = None
    timeout_s: float = 300.0
    max_smem: int | None = None


def run(opts: BenchOptions, out: Output) -> Result:
    """Measures, shows, and compares with a baseline.

    Raises:
        UsageError: an unknown op, architecture or provider.
        UnsupportedError: no GPU, or not one whose code can be measured.
    """
    if opts.arch is not None:
        opts = replace(opts, arch=arch_name(opts.arch))
    for name in opts.providers:
        check_choice("--provider", name, bench.PROVIDERS)
    pairs.check_bench(
        ops=opts.ops, providers=opts.providers, torch_from=opts.torch_from is not None, baseline=opts.baseline is not None,
        threshold=opts.threshold is not None, max_smem=opts.max_smem is not None,
    )  # fmt: skip
    if opts.output is not None:
        outfile.check(opts.output)
    old = results.read(opts.baseline) if opts.baseline else None
    target = find_target(opts.where, out)
    root = payload_root(target, out)
    request = bench.Request(
        root, interpreter(opts.where, target, out), _ops(opts, root), target.parent if target else None,
        opts.torch_from, tuple(opts.providers) or bench.PROVIDERS, opts.arch, opts.timeout_s, opts.max_smem,
    )  # fmt: skip
    with out.progress(None, "bench") as progress:

        def show(row: dict[str, Any]) -> None:
            text = f"{row['op']} {case_text(row['case'])} {row['provider']}"
            progress.advance(text)
            progress.line(f"bench: {text} {latency_text(row)}")

        result = bench.measure(request, show, out.note)
    if opts.output is not None:
        results.write(result, opts.output)
        out.note(f"written to {opts.output}")
    out.note(environment_line(result["environment"]))
    out.table(result_table(result["rows"]))
    return _judge(opts, out, result, old)


def _ops(opts: BenchOptions, root: Path) -> tuple[str, ...]:
    known = ops.ops_of(root)
    unknown = sorted(set(opts.ops) - set(known))
    if unknown:
        ops.check_known(unknown, root, "there is nothing to measure")
    return tuple(op for op in known if not opts.ops or op in opts.ops)


def _judge(opts: BenchOptions, out: Output, result: dict[str, Any], old: dict[str, Any] | None) -> Result:
    errors = [
        ErrorItem(
            "case-failed",
            f"{row['op']} {case_text(row['case'])} {row['provider']}: {row['status']} {row['reason']}",
        )
        for row in result["rows"]
        if row["status"] not in _HARMLESS and row["provider"] == "overlay"
    ]
    for row in result["rows"]:
        if row["status"] != "PASSED" and row["provider"] != "overlay":
            text = f"{row['op']} {case_text(row['case'])} {row['provider']}"
            out.note(f"not measured: {text}: {row['status']} {row['reason']}")
    if not errors and not any(row["latency_us"] for row in result["rows"]):
        problem = ErrorItem("nothing-runnable", "nothing was measured: see the reasons above")
        return Result("bench", dict(result), ExitCode.UNSUPPORTED, (problem,))
    data = dict(result)
    if old is not None:
        both, gone = results.changes(old, result)
        out.table(change_table(both))
        threshold = _THRESHOLD if opts.threshold is None else opts.threshold
        slower = [change for change in both if change.ratio > 1 + threshold]
        errors += [
            ErrorItem(
                "regression",
                f"{change.row['op']} {case_text(change.row['case'])}: {change.before_us:.1f} us became "
                f"{change.after_us:.1f} us ({change.ratio:.2f}x)",
            )
            for change in slower
        ]
        if gone:
            out.warn(f"{plural(len(gone), 'row')} of {opts.baseline} were not measured this time")
        if old["environment"].get("gpu") != result["environment"].get("gpu"):
            out.warn(f"{opts.baseline} was measured on {old['environment'].get('gpu')}")
        data["baseline"] = {
            "file": str(opts.baseline), "threshold": threshold, "compared": len(both), "missing": len(gone),
            "regressions": len(slower),
        }  # fmt: skip
    return Result("bench", data, ExitCode.FAILED if errors else ExitCode.OK, tuple(errors))


def case_text(case: dict[str, Any]) -> str:
    """A case in a table's cell: `tokens=49152 block_size=64`."""
    return " ".join(f"{name}={value}" for name, value in case.items())


def latency_text(row: dict[str, Any]) -> str:
    """Its median, or why there is none."""
    return f"{row['latency_us']['p50']:.1f} us" if row["latency_us"] else str(row["status"])


def result_table(rows: list[dict[str, Any]]) -> Table:
    """Latency, the overlay's speed-up over each baseline, throughput and its share of the ceiling."""
    others = [name for name in bench.PROVIDERS[1:] if any(row["provider"] == name for row in rows)]
    headers: list[str | tuple[str, Justify]] = [
        "Op", "Case", "Provider", "Code", "Timing", ("Latency (us)", RIGHT), ("p20-p80 (us)", RIGHT),
        *((f"vs {name}", RIGHT) for name in others), ("GB/s", RIGHT), ("TFLOP/s", RIGHT), ("Ceiling", RIGHT), "Status",
    ]  # fmt: skip
    return table(headers, (_cells(rows, row, others) for row in rows))


def _cells(rows: list[dict[str, Any]], row: dict[str, Any], others: list[str]) -> list[str | None]:
    latency = row["latency_us"]
    ours = row["provider"] == "overlay"
    ratios = [results.speedup(rows, row, name) if ours else None for name in others]
    spread = f"{latency['p20']:.1f}-{latency['p80']:.1f}" if latency else None
    median = latency["p50"] if latency else None
    return [
        row["op"], case_text(row["case"]), row["provider"], row["codegen"], row["timing"],
        f"{median:.1f}" if median else None, spread,
        *[None if ratio is None else f"{ratio:.2f}x" for ratio in ratios],
        f"{row['bytes'] / median / 1e3:.0f}" if median else None,
        f"{row['flops'] / median / 1e6:.1f}" if median and row["flops"] else None,
        ceiling_text(row), row["status"],
    ]  # fmt: skip


def ceiling_text(row: dict[str, Any]) -> str | None:
    """The share of the ceiling that binds, such as `75 % of copy`; None where nothing was timed."""
    fraction = row["ceiling_fraction"]
    return None if fraction is None else f"{100 * fraction:.0f} % of {row.get('ceiling', 'copy')}"


def change_table(changes: list[results.Change]) -> Table:
    """New against old latency of the overlay's rows."""
    headers = ("Op", "Case", "Timing", ("Before (us)", RIGHT), ("Now (us)", RIGHT), ("Now/before", RIGHT))
    return table(headers, ((
        one.row["op"], case_text(one.row["case"]), one.row["timing"], f"{one.before_us:.1f}", f"{one.after_us:.1f}",
        f"{one.ratio:.2f}x",
    ) for one in changes), "Against the baseline")  # fmt: skip


def environment_line(environment: dict[str, Any]) -> str:
    """The machine in one line; the file also has a digest of each op's kernels."""
    parts = []
    for name, value in environment.items():
        if name == results.KERNELS:
            continue
        if isinstance(value, dict):
            value = "/".join(f"{part} ({key})" for key, part in value.items())
        parts += [f"{name} {value}"] if value is not None else []
    return ", ".join(parts)
