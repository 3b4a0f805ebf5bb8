"""Prints how long the commands that must be quick take, best and median of a few runs; asserts nothing.

python scripts/time_startup.py [--target PATH]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 7
BUDGET_S = 0.3


def seconds(arguments: list[str]) -> list[float]:
    """Wall times of one command line, sorted."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "deepinfer_cli", *arguments], capture_output=True, check=False)
        times.append(time.perf_counter() - start)
    return sorted(times)


def main() -> None:
    """Times `--help`, `--version` and `status`, the latter with this script's arguments."""
    for arguments in (["--help"], ["--version"], ["status", *sys.argv[1:]]):
        times = seconds(arguments)
        text = f"best {times[0]:.3f} s, median {statistics.median(times):.3f} s (budget {BUDGET_S} s)"
        print(f"deepinfer {' '.join(arguments)}: {text}")


if __name__ == "__main__":
    main()
