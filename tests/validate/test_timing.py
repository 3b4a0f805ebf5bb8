from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from deepinfer_cli.validate import runner, timing
from deepinfer_cli.validate.bench_worker import Codegen, _compiled_for
from deepinfer_cli.validate.model import CaseResult, Level, Status


def test_quantiles_of_the_samples():
    assert timing.quantiles([float(n) for n in range(1, 12)]) == {"p20": 3.0, "p50": 6.0, "p80": 9.0}
    assert timing.quantiles([5.0]) == {"p20": 5.0, "p50": 5.0, "p80": 5.0}


def test_timers_take_turns_and_the_order_is_reversed_every_other_round():
    order = []

    class Fake:
        def __init__(self, name: str, value: float) -> None:
            self.name, self.value = name, value

        def sample(self) -> float:
            order.append(self.name)
            return self.value

    found = timing.alternate({"a": Fake("a", 1.0), "b": Fake("b", 2.0)}, rounds=4)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert found["b"]["p50"] == 2.0


_COMPILE = """
import os, sys
from pathlib import Path
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deepinfer_cli.validate.bench_worker import Codegen

@triton.jit
def _copy(x_ptr, y_ptr, N: tl.constexpr):
    offset = tl.arange(0, N)
    tl.store(y_ptr + offset, tl.load(x_ptr + offset))

codegen = Codegen("sm80")
codegen.watch()
# the target is the card, as on a machine with one; the variable that `of` sets decides what code is made
for name in ("stock", "overlay", "overlay"):
    with codegen.of(name):
        signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "N": "constexpr"}
        triton.compile(ASTSource(_copy, signature, {"N": 128}), target=GPUTarget("cuda", 90, 32))
assert "TRITON_OVERRIDE_ARCH" not in os.environ
print(codegen.name("overlay"), codegen.name("stock"), codegen.name("torch"))
"""


@pytest.mark.kernels
def test_codegen_is_read_from_the_compiled_kernels(tmp_path: Path):
    import subprocess

    script = tmp_path / "compile_both.py"
    script.write_text(_COMPILE)
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["sm80", "native", "native"], done.stderr[-2000:]


@pytest.mark.parametrize("seen", [set(), {"native"}, {"sm80", "native"}, {"sm86"}])
def test_overlay_code_that_is_not_what_was_asked_for_is_never_labelled(seen):
    codegen = Codegen("sm80", {"overlay": seen})
    with pytest.raises(RuntimeError, match="not for sm80"):
        codegen.name("overlay")


def test_code_that_cannot_be_read_is_not_named_by_what_was_asked_for(tmp_path: Path):
    assert _compiled_for({"metadata": {"arch": "sm80"}, "metadata_group": {}}) == "unknown"
    ir = tmp_path / "kernel.ttgir"
    for text, want in (("hip:gfx942", "unknown"), ('"cuda:90"', "native"), ('"cuda:86"', "sm86")):
        ir.write_text(text)
        assert _compiled_for({"metadata": {}, "metadata_group": {"kernel.ttgir": str(ir)}}) == want


def test_on_an_ampere_card_the_code_is_named_by_the_card():
    codegen = Codegen(None, {"overlay": {"sm86"}, "baseline": {"sm86"}})
    assert (codegen.name("overlay"), codegen.name("stock")) == ("sm86", "sm86")


def _result(name: str, status: Status) -> dict[str, object]:
    return {"event": "result", "result": CaseResult(name, "fake", Level.NUMERICS, status).to_json()}


def test_a_context_that_an_illegal_access_ended_is_left_for_a_new_worker(fake_job, monkeypatch):
    plan = {"event": "plan", "cases": ["a", "b", "c"]}
    first = [plan, {"event": "start", "case": "a"}, _result("a", Status.RUNTIME_ERROR), {"event": "restart"}]
    second = [plan | {"cases": ["b", "c"]}, _result("b", Status.PASSED), _result("c", Status.PASSED)]
    feed = iter([first, second])
    asked = []

    def events(job, cases, crew):
        asked.append(cases)
        yield from next(feed)
        yield runner.WorkerEnd(Status.PASSED)

    monkeypatch.setattr(runner, "events", events)
    found = [(item.case, item.status) for item in runner.run_cases(fake_job("a"))]
    assert found == [("a", Status.RUNTIME_ERROR), ("b", Status.PASSED), ("c", Status.PASSED)]
    assert asked == [None, ["b", "c"]]
