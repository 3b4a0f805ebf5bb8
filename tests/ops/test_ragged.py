"""`build_ragged`: its oracle against stock's functions, its launches, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

CHILD = Path(__file__).with_name("stock_ragged_child.py")
MODULE = "v1/attention/ops/rocm_aiter_mla_sparse.py"


class Recorder:
    """Stands for a kernel and keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append((grid, options))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    recorder = Recorder()
    monkeypatch.setattr("deepinfer_sm80.ops.ragged.triton._ragged_kernel", recorder)
    return recorder.launches


def call(tokens: int, width: int, *, compact: bool, **changed: Any) -> Any:
    from deepinfer_sm80.ops.ragged import build_ragged

    inputs = {
        "indices": torch.zeros((tokens, width), dtype=torch.int32),
        "lengths": torch.zeros(tokens, dtype=torch.int32),
    }
    return build_ragged(**{**inputs, **changed}, compact=compact)


@pytest.mark.parametrize(
    ("tokens", "width", "compact", "expected"),
    [
        (1, 128, True, [(1, "rows")]),
        (1, 2176, True, [(1, "rows")]),
        (8, 128, True, [(2, "rows")]),
        (9, 128, True, [(3, "none"), (3, "sums")]),
        (96, 128, True, [(24, "none"), (24, "sums")]),
        (2048, 640, True, [(2048, "none"), (2048, "sums")]),
        (16384, 2176, True, [(16384, "none"), (16384, "sums")]),
        (16384, 128, False, [(4096, "lengths")]),
        (3, 0, True, [(1, "rows")]),
        (0, 128, True, []),
    ],
)
def test_launches(launches, tokens, width, compact, expected):
    flat, indptr = call(tokens, width, compact=compact)
    assert [(grid[0], options["BEFORE"]) for grid, options in launches] == expected
    assert (flat.shape, indptr.shape) == ((tokens * width,), (tokens + 1,))
    assert flat.dtype == indptr.dtype == torch.int32


def test_what_does_not_fit_is_refused(launches):
    with pytest.raises(ValueError, match="4 rows need as many lengths, got 3"):
        call(4, 5, compact=True, lengths=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="no dims"):
        call(1, 1, compact=True, indices=torch.tensor(3, dtype=torch.int32))
    huge = torch.empty((1 << 20, 1 << 11), dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="2147483648 entries"):
        call(1, 1, compact=True, indices=huge, lengths=torch.empty(1 << 20, dtype=torch.int32, device="meta"))
    assert launches == []


@pytest.mark.release
@pytest.mark.parametrize(
    ("version", "fewest"), [("0.30.0", 9), ("0.31.0", 9), ("0.32.0", 17), ("0.33.0", 17)]
)
def test_the_oracle_equals_stock(pristine_release, tmp_path, version, fewest):
    """Its function and its kernels, from the release's own file, in Triton's interpreter."""
    child = subprocess.run(
        [sys.executable, str(CHILD), str(pristine_release(version) / "vllm" / MODULE), str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    checks = [json.loads(line) for line in child.stdout.splitlines()]
    assert [name for name, same in checks if not same] == []
    assert len(checks) >= fewest
