from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepinfer_cli.detect.vllm import find_target
from deepinfer_cli.overlay import manifest, payload
from deepinfer_cli.validate import liverun, runner, verify
from deepinfer_cli.validate.model import Level, NotRun, Status
from deepinfer_cli.validate.request import Request
from tests.payload.test_live import EVERY_OP, HOOKED, OPS, tree

__all__ = ["tree"]


@pytest.fixture(autouse=True)
def _a100(monkeypatch: pytest.MonkeyPatch):
    """A machine with an A100, as far as the probe can tell; the child's vLLM has a platform that says the same."""
    gpu = {"name": "NVIDIA A100", "capability": [8, 0]}
    monkeypatch.setattr(runner, "probe", lambda python: {"torch": "2", "triton": "3", "gpu": gpu})
    monkeypatch.setenv("DEEPINFER_DISABLE", "1")


def _verify(parent: Path):
    root = parent / "vllm" / payload.PACKAGE
    root = root if root.is_dir() else payload.bundled().root
    request = Request(find_target(target=parent), root, Path(sys.executable), (Level.LIVE,))
    return verify.verify(request)


def test_bound_with_the_gate_on_and_nothing_with_it_off(tree):
    # the small vLLM has what most of the accelerate group replaces, and its hooks leave out the rest
    lacking = tuple(op.name for op in manifest.load().ops if op.name not in OPS)
    report = _verify(tree(skip=lacking))
    assert [(item.case, item.status, item.reason) for item in report.results] == [
        ("overlay[bound]", Status.PASSED, ""),
        ("overlay[off with DEEPINFER_DISABLE=1]", Status.PASSED, ""),
    ]
    assert {item["op"] for item in report.results[0].extra["bound"]} == set(EVERY_OP)
    assert report.results[1].extra["bound"] == []
    assert not report.not_run


def test_a_wrongly_bound_importer_fails(tree):
    thief = "models/deepseek_v41/nvidia/flashmla.py"
    code = "def dequantize_and_gather_k_cache():\n    pass\n"
    report = _verify(tree(changed={thief: code}))
    bound = report.results[0]
    assert bound.status is Status.FAILED
    assert "flashmla holds another dequantize_and_gather_k_cache" in bound.reason


def test_a_vllm_that_cannot_be_imported_is_not_run_and_says_what_to_do(tree):
    report = _verify(tree(changed={"__init__.py": "import no_such_requirement\n"}))
    assert report.results == ()
    (item,) = report.not_run
    assert "ModuleNotFoundError: No module named 'no_such_requirement'" in item.reason
    assert "--python" in item.how


def test_an_overlay_that_refuses_to_bind_fails(tree):
    path = HOOKED["vllm.models.deepseek_v41.common.ops.cache_utils"]
    parent = tree()
    source = parent / "vllm" / path
    text = source.read_text()
    source.write_text(text.replace("max_gather_len=None", "max_gather_len=None, unheard_of=None", 1))
    report = _verify(parent)
    assert report.results[0].status is Status.FAILED
    assert "deepinfer status" in report.results[0].reason


def test_a_hang_is_a_timeout(tree):
    parent = tree(changed={"__init__.py": "import time\ntime.sleep(600)\n"})
    job = liverun.LiveJob(Path(sys.executable), parent, "deepseek_v41", (), (), (), None, 2.0)
    (first, second), _ = liverun.run(job)
    assert (first.status, second.status) == (Status.TIMEOUT, Status.TIMEOUT)


def test_a_crash_is_a_runtime_error(tree):
    parent = tree(changed={"__init__.py": "import os\nos.write(2, b'last words')\nos._exit(9)\n"})
    job = liverun.LiveJob(Path(sys.executable), parent, "deepseek_v41", (), (), (), None, 60.0)
    (first, _second), not_run = liverun.run(job)
    assert (first.status, first.reason) == (Status.RUNTIME_ERROR, "exit code 9: last words")
    assert not isinstance(not_run, NotRun)


def test_a_check_leaves_no_bytecode(tree):
    parent = tree()
    _verify(parent)
    assert not list(parent.rglob("__pycache__"))
