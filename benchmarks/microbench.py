"""What the microbench scripts share: run from a checkout with nothing installed but torch and triton."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = ROOT / "benchmarks" / "results" / "sm80_benchmark_summary.json"
sys.path[:0] = [str(ROOT), str(ROOT / "overlays")]


def main(ops: tuple[str, ...], description: str, argv: list[str] | None = None) -> int:
    """Measures `ops`, prints a table, and writes or merges the result file."""
    from deepinfer_cli.errors import DeepInferError
    from deepinfer_cli.overlay import payload
    from deepinfer_cli.validate import bench

    parser = _parser(description, ops)
    options = parser.parse_args(argv)
    if options.merge and (options.tokens or options.provider):
        parser.error("--merge takes the place of all rows of an op: not with --tokens or --provider")
    ops = tuple(op for op in ops if not options.op or op in options.op)
    parent = _parent(options.target)
    # the checkout's overlay is what these scripts are about, whatever is installed in the target
    root = (options.payload or ROOT / "overlays" / "deepinfer_sm80").resolve()
    request = bench.Request(
        root, Path(sys.executable), ops, parent, options.torch_from,
        tuple(options.provider) or bench.PROVIDERS, options.arch, options.timeout, options.max_smem,
        tuple(options.tokens),
    )  # fmt: skip
    try:
        print(f"payload {root} {payload.load(root).digest[:12]}", file=sys.stderr)
        result = bench.measure(
            request,
            _print_row,
            lambda text: print(text, file=sys.stderr),
            lambda part: _save(part, options),
        )
    except DeepInferError as error:
        print(f"error[{error.code}]: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return int(error.exit_code)
    bad = [row for row in result["rows"] if row["provider"] == "overlay" and row["status"] != "PASSED"]
    return 1 if bad else 0


def _save(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes what has been measured so far; several scripts may merge into one summary at once."""
    import fcntl

    from deepinfer_cli.validate import results

    if options.commit:
        result["environment"]["commit"] += f", git {options.commit}"
    if options.output:
        results.write(result, options.output)
    if options.merge:
        with Path(tempfile.gettempdir(), f"deepinfer-merge-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            old = results.read(options.merge) if options.merge.exists() else None
            for op in sorted(results.changed_ops(old, result)) if old else ():
                print(f"{op}: its kernels have changed: all its earlier rows go", file=sys.stderr)
            results.write(results.merge(old, result), options.merge)


def _parser(description: str, ops: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--arch", choices=("sm80", "sm86", "sm89"), help="measure its code on a newer card")
    parser.add_argument("--op", action="append", default=[], choices=ops, help="only this op; repeatable")
    parser.add_argument("--tokens", type=int, action="append", default=[], help="only this size; repeatable")
    parser.add_argument(
        "--max-smem", type=int, metavar="BYTES", help="only kernel variants that take no more shared memory"
    )
    parser.add_argument("--target", type=Path, help="folder that contains vllm, for the stock baselines")
    parser.add_argument("--torch-from", type=Path, help="a vLLM 0.30.0 tree, for the torch baseline")
    parser.add_argument("--payload", type=Path, help="overlay to measure; default: this checkout's")
    parser.add_argument("--provider", action="append", default=[], help="measure only these; repeatable")
    parser.add_argument("--output", type=Path, help="result file to write")
    parser.add_argument(
        "--merge", type=Path, nargs="?", const=SUMMARY, help="summary to merge the result into"
    )
    parser.add_argument("--commit", help="git commit of this checkout, where its .git folder is not at hand")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one case")
    return parser


def _parent(target: Path | None) -> Path | None:
    if target is None:
        return None
    target = target.resolve()
    return target.parent if target.name == "vllm" and (target / "__init__.py").is_file() else target


def _print_row(row: dict[str, Any]) -> None:
    latency = row["latency_us"]
    case = " ".join(f"{name}={value}" for name, value in row["case"].items())
    parts = [f"{row['op']:15} {case:52} {row['provider']:16} {row['codegen']:7} {row['timing']:7}"]
    if latency is None:
        parts.append(f"{row['status']} {row.get('reason', '')}")
    else:
        median = latency["p50"]
        parts.append(f"{median:10.1f} us {row['bytes'] / median / 1e3:8.0f} GB/s")
        parts += [f"{row['flops'] / median / 1e6:7.1f} TFLOP/s"] if row["flops"] else []
        fraction = row["ceiling_fraction"]
        parts += [f"{100 * fraction:3.0f} % of {row['ceiling']}"] if fraction is not None else []
    print(" ".join(parts), flush=True)
