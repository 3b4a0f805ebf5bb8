from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels
pytest.importorskip("torch")

from deepinfer_cli.validate import baselines, bench_worker  # noqa: E402
from deepinfer_cli.validate.compare import compare_outputs  # noqa: E402
from deepinfer_cli.validate.model import Status  # noqa: E402
from deepinfer_cli.validate.numerics import workloads_of  # noqa: E402


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0"])
def test_the_torch_chain_is_taken_from_the_release_and_agrees_with_the_oracle(real_release, version):
    workloads = workloads_of("combine")
    (torch_chain,) = [
        item
        for item in baselines.providers("combine", workloads, real_release(version), None)
        if item.name == baselines.TORCH
    ]
    assert not torch_chain.problem and torch_chain.timings == ("events",)
    for case in workloads.cases("smoke"):
        if not case.name.startswith("rocm") or case.params.get("ratio") == 0:
            continue
        inputs = workloads.make_inputs(case, "cpu")
        want = workloads.expected(case, inputs)
        verdict = compare_outputs(workloads.run(inputs, torch_chain.function), want, workloads.TOLERANCES)
        assert verdict.ok, f"{case.id}: {verdict.reason}"


@pytest.mark.release
def test_a_release_without_the_chain_says_how_to_name_one(real_release):
    found = baselines.providers("combine", workloads_of("combine"), real_release("0.33.0"), None)
    (torch_chain,) = [item for item in found if item.name == baselines.TORCH]
    assert "--torch-from" in torch_chain.problem
    (overlay,) = [item for item in found if item.name == baselines.OVERLAY]
    assert overlay.timings == ("graph",)


def test_what_cannot_be_taken_alone_is_refused(tmp_path: Path):
    path = tmp_path / "rocm.py"
    path.write_text(
        "import os\nA = 3\n\n\ndef f(x):\n    return helper(x) + A\n\n\ndef g(x):\n    return len(x) + A\n"
    )
    assert baselines.extract_function(path, "g")([1]) == 4
    with pytest.raises(ValueError, match="also needs helper"):
        baselines.extract_function(path, "f")
    with pytest.raises(ValueError, match="no function h"):
        baselines.extract_function(path, "h")


_CACHE_UTILS = """
import os
SWITCH = os.environ.get("DEEPINFER_DISABLE")

def dequantize_and_gather_k_cache(out, seq_lens, use_fnuz=False):
    return ("stock", out, seq_lens, use_fnuz)
"""

_LOAD = """
import os, sys
from pathlib import Path
from deepinfer_cli.validate import baselines
function, source = baselines.load_stock(Path(sys.argv[1]), "dequantize_and_gather_k_cache")
module = sys.modules[function.__module__]
print(function(1, 2)[0], module.SWITCH, os.environ.get("DEEPINFER_DISABLE"), source == module.__file__)
"""


@pytest.mark.parametrize("needs_package", [False, True])
def test_stock_is_loaded_with_the_overlay_off_and_without_the_models(tmp_path: Path, needs_package):
    ops = tmp_path / "vllm" / "models" / "deepseek_v4_1" / "common" / "ops"
    ops.mkdir(parents=True)
    for folder in (ops, ops.parent, tmp_path / "vllm" / "models", tmp_path / "vllm"):
        (folder / "__init__.py").write_text("")
    loaded = "MODEL = 1\n" if needs_package else "raise SystemExit('the models were imported')\n"
    (ops.parent.parent / "__init__.py").write_text(loaded)
    first = "from vllm.models.deepseek_v4_1 import MODEL\n" if needs_package else ""
    (ops / "cache_utils.py").write_text(first + _CACHE_UTILS)
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.stdout.split() == ["stock", "1", "None", "True"], done.stderr


def test_our_own_function_is_never_measured_as_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "vllm" / "models" / "deepseek_v41").mkdir(parents=True)
    vllm = types.ModuleType("vllm")
    vllm.__file__ = str(tmp_path / "vllm" / "__init__.py")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ours = types.SimpleNamespace(symbol=lambda: None, __file__="cache_utils.py")
    monkeypatch.setattr(baselines, "_import_ops", lambda name, parent: ours)
    assert baselines.load_stock(tmp_path, "symbol")[0] is ours.symbol
    ours.symbol.__deepinfer__ = {"op": "gather"}
    with pytest.raises(ImportError, match="bound to the overlay"):
        baselines.load_stock(tmp_path, "symbol")


def test_without_a_vllm_the_stock_rows_say_so():
    found = baselines.providers("gather", workloads_of("gather"), None, None)
    assert [(item.name, bool(item.problem)) for item in found] == [
        ("overlay", False),
        ("stock", True),
        ("stock-0.30-grid", True),
    ]


def test_arguments_that_a_release_does_not_know_are_left_out():
    workloads = workloads_of("gather")
    inputs = workloads.make_inputs(workloads.cases("smoke")[0], "cpu")

    def old(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, use_fnuz=False):
        return use_fnuz

    def new(out, k_cache, max_gather_len=7, **_more):
        return max_gather_len

    assert baselines.adapt(old, workloads, "stock")(**inputs) is False
    assert baselines.adapt(new, workloads, "stock-0.30-grid")(**inputs) is None
    assert baselines.adapt(new, workloads, "stock")(**inputs) == inputs["max_gather_len"]


def test_a_red_provider_is_never_timed():
    workloads = workloads_of("combine")
    case = next(case for case in workloads.cases("smoke") if case.name == "two-requests")
    inputs = workloads.make_inputs(case, "cpu")

    def wrong(**arguments):
        indices, lens = workloads.reference.combine(**arguments)
        return indices, lens + 1

    status, reason = bench_worker.check(workloads, case, inputs, baselines.Provider("stock", wrong))
    assert status is Status.FAILED and reason.startswith("lens:")

    def unhappy(**_arguments):
        raise RuntimeError("no")

    outcome = bench_worker.check(workloads, case, inputs, baselines.Provider("stock", unhappy))
    assert outcome == (Status.RUNTIME_ERROR, "RuntimeError: no")
    right = baselines.Provider("stock", workloads.reference.combine)
    assert bench_worker.check(workloads, case, inputs, right) == (Status.PASSED, "")
