"""Numerics and kernels against their references, in Triton's interpreter (a child process: see `child.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.catalog import INTERPRETED

pytestmark = pytest.mark.kernels
CHILD = Path(__file__).with_name("child.py")


# checks at least: what no longer runs must be missed
FEWEST = {
    "indexer_prefill": 27,
    "indexer_decode": 27,
    "engram": 20,
    "indexer_k": 25,
    "indexer_q": 38,
    "kv_insert": 21,
    "numerics": 4,
    "gather": 24,
    "combine": 58,
    "ragged": 60,
    "sparse_prefill": 44,
    "sparse_decode": 52,
}


def test_every_op_with_a_triton_kernel_is_here() -> None:
    assert {*INTERPRETED, "numerics"} == set(FEWEST)


@pytest.mark.parametrize(("subject", "fewest"), list(FEWEST.items()))
def test_equals_reference(subject: str, fewest: int) -> None:
    child = subprocess.run(
        [sys.executable, str(CHILD), subject],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    checks = [json.loads(line) for line in child.stdout.splitlines()]
    assert [(name, detail) for name, passed, detail in checks if not passed] == []
    assert len(checks) >= fewest
