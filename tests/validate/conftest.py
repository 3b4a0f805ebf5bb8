"""A payload with one fake op, whose cases do what their names say."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from deepinfer_cli.overlay import payload
from deepinfer_cli.validate import toolkit
from deepinfer_cli.validate.runner import Job


def toolkit_missing() -> str:
    """Why TileLang kernels cannot be built here; empty when they can."""
    if importlib.util.find_spec("tilelang") is None:
        return "NOT TESTED: TileLang kernels, there is no tilelang"
    return "" if toolkit.find("nvcc") else "NOT TESTED: TileLang kernels, there is no nvcc"


_SPEC = Path(payload.bundled().root) / "ops" / "spec.py"

_GATE = """
from contextlib import contextmanager

@contextmanager
def assume(*, sm_count):
    yield
"""

_WORKLOADS = """
import os
import signal
import sys
import time

import torch

from ..spec import Case, Tolerance

OP = "fake"
TOLERANCES = {"out": Tolerance()}
NAMES = os.environ["FAKE_CASES"].split(",")

def cases(suite):
    return tuple(Case("fake", name, params={"do": name}, gpu_only=name == "gpu") for name in NAMES)

def make_inputs(case, device):
    torch.manual_seed(case.seed)
    return {"x": torch.randn(8), "out": torch.full((8,), float("nan")), "do": case.params["do"]}

def expected(case, inputs):
    return {"out": inputs["x"] * 2}

def run(inputs, function=None):
    what, x, out = inputs["do"], inputs["x"], inputs["out"]
    if what == "segfault":
        print("about to crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        os._exit(7)
    if what == "hang":
        time.sleep(600)
    if what == "raise":
        raise RuntimeError("the kernel is unhappy")
    out.copy_(x * 2)
    if what == "wrong":
        out[3] += 1
    if what == "scribble":
        x[0] = 0
    if what == "print":
        print("kernels may print to stdout")
    return {"out": out}
"""


@pytest.fixture
def case_payload(tmp_path: Path) -> Path:
    """A payload folder, in a path with a space and a letter outside ASCII."""
    root = tmp_path / "a päyload dir" / "deepinfer_sm80"
    op = root / "ops" / "fake"
    op.mkdir(parents=True)
    for folder in (root, root / "ops", op):
        (folder / "__init__.py").write_text("")
    (root / "gate.py").write_text(_GATE)
    shutil.copy(_SPEC, root / "ops" / "spec.py")
    (op / "workloads.py").write_text(_WORKLOADS)
    return root


@pytest.fixture
def fake_job(case_payload: Path):
    """Makes a job that runs the named cases on the CPU."""

    def make(*cases: str, timeout_s: float = 60.0, digest: str | None = None) -> Job:
        request = {
            "task": "cases", "payload": str(case_payload), "op": "fake", "level": "interpreter", "suite": "smoke",
            "digest": digest or payload.load(case_payload).digest,
        }  # fmt: skip
        env = {"TRITON_INTERPRET": "1", "FAKE_CASES": ",".join(cases)}
        return Job(Path(sys.executable), request, env, timeout_s)

    return make
