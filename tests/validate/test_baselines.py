from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels
torch = pytest.importorskip("torch")

from deepinfer_cli.validate import baselines, bench_worker, stock  # noqa: E402
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
from deepinfer_cli.validate import baselines, stock
function, source = stock.load(Path(sys.argv[1]), baselines._STOCK["gather"]["stock"])
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
    monkeypatch.setattr(stock, "import_alone", lambda name, hollow, parent: ours)
    source = stock.Source("vllm.models.{layout}.x", "symbol")
    assert stock.load(tmp_path, source)[0] is ours.symbol
    ours.symbol.__deepinfer__ = {"op": "gather"}
    with pytest.raises(ImportError, match="bound to the overlay"):
        stock.load(tmp_path, source)


_SPARSE = """
from vllm.utils.torch_utils import direct_register_custom_op
CACHE = {}

def build_ragged_indices_from_dense(indices):
    CACHE[indices] = True
    return sorted(CACHE)

direct_register_custom_op("wo_a", build_ragged_indices_from_dense)
"""
_TORCH_UTILS = """
OPS = []

def direct_register_custom_op(name, function):
    if name in OPS:
        raise RuntimeError(f"{name} is registered twice")
    OPS.append(name)
"""
_PLATFORMS = """
class Cuda:
    @classmethod
    def is_arch_support_pdl(cls):
        return True

current_platform = Cuda()
"""
_KERNELS = """
from vllm.platforms import current_platform
PDL = current_platform.is_arch_support_pdl()
"""
_WARMUP = """
from vllm.model_executor.kernels.mhc.tilelang_kernels import PDL
from vllm.utils.deep_gemm import is_deep_gemm_supported
SPLITS = 16 if is_deep_gemm_supported() else 1
"""
_MHC = """
def mhc_post_tilelang(x, residual):
    from vllm.model_executor.kernels.mhc.tilelang_kernels import PDL
    from vllm.model_executor.kernels.mhc.warmup import SPLITS
    from vllm.utils.deep_gemm import is_deep_gemm_supported
    return x, PDL, SPLITS, is_deep_gemm_supported()
"""


@pytest.fixture
def fake_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM with the modules that baselines come from; importing the mHC package itself is an error."""
    files = {
        "__init__.py": "", "utils/__init__.py": "", "utils/torch_utils.py": _TORCH_UTILS, "platforms.py": _PLATFORMS,
        "utils/deep_gemm.py": "def is_deep_gemm_supported():\n    return True\n",
        "v1/__init__.py": "", "v1/attention/__init__.py": "", "v1/attention/ops/__init__.py": "",
        "v1/attention/ops/rocm_aiter_mla_sparse.py": _SPARSE,
        "model_executor/__init__.py": "", "model_executor/kernels/__init__.py": "",
        "model_executor/kernels/mhc/__init__.py": "raise SystemExit('every backend was imported')",
        "model_executor/kernels/mhc/tilelang.py": _MHC, "model_executor/kernels/mhc/tilelang_kernels.py": _KERNELS,
        "model_executor/kernels/mhc/warmup.py": _WARMUP,
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(stock.Mhc, "_copies", {})
    yield tmp_path
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]


def test_sm80_code_comes_from_a_copy_whose_kernels_nothing_else_has_compiled(fake_stock: Path):
    sources = baselines._STOCK["ragged"]
    plain, _path = stock.load(fake_stock, sources["stock"])
    copy, path = stock.load(fake_stock, sources["stock-sm80"])
    assert plain("a") == ["a"] and copy("b") == ["b"]
    assert path.endswith("rocm_aiter_mla_sparse.py")
    registered = sys.modules["vllm.utils.torch_utils"]
    assert registered.OPS == ["wo_a"]
    with pytest.raises(RuntimeError, match="registered twice"):
        registered.direct_register_custom_op("wo_a", None)


def test_mhc_takes_the_path_of_an_ampere_card(fake_stock: Path):
    sources = baselines._STOCK["mhc_post"]
    ampere, _path = stock.load(fake_stock, sources["stock"])
    again, _path = stock.load(fake_stock, sources["stock"])
    for _ in range(2):
        assert ampere(1, 2) == again(1, residual=2) == (1, False, 1, False)
    # afterwards vLLM is as it was
    assert sys.modules["vllm.platforms"].current_platform.is_arch_support_pdl()
    assert sys.modules["vllm.utils.deep_gemm"].is_deep_gemm_supported()
    assert "vllm.model_executor.kernels.mhc.warmup" not in sys.modules
    call = baselines.adapt(ampere, types.SimpleNamespace(call_kwargs=lambda inputs, style: inputs), "stock")
    assert call(x=5, residual=6, unknown=7)[0] == 5
    assert call.arguments({"x": 5, "residual": 6, "unknown": 7}) == {"x": 5, "residual": 6}


def test_a_provider_knows_how_it_was_loaded(fake_stock: Path):
    workloads = types.SimpleNamespace(call_kwargs=lambda inputs, style: inputs)
    how = {
        item.name: item.how
        for op in ("ragged", "mhc_post")
        for item in baselines.providers(op, workloads, fake_stock, None, forced=op == "ragged")
    }
    assert how == {"overlay": "plain", "stock": "mhc", "stock-sm80": "copy"}


def test_forced_code_adds_the_baselines_in_that_code(fake_stock: Path):
    workloads = types.SimpleNamespace(call_kwargs=lambda inputs, style: inputs)
    names = {
        (op, forced): [item.name for item in baselines.providers(op, workloads, fake_stock, None, forced)]
        for op in ("sparse_prefill", "sparse_decode", "mhc_pre_delayed", "mhc_post_with_sqrsum")
        for forced in (False, True)
    }
    assert names == {
        ("sparse_prefill", False): ["overlay", "stock"],
        ("sparse_prefill", True): ["overlay", "stock", "stock-sm80"],
        ("sparse_decode", False): ["overlay", "stock"],
        ("sparse_decode", True): ["overlay", "stock"],
        ("mhc_pre_delayed", False): ["overlay", "stock"],
        ("mhc_pre_delayed", True): ["overlay", "stock"],
        # no release has such a function
        ("mhc_post_with_sqrsum", False): ["overlay"],
        ("mhc_post_with_sqrsum", True): ["overlay"],
    }


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0", "0.33.0"])
def test_every_baseline_is_in_every_release(real_release, version):
    import ast

    root = real_release(version)
    for sources in baselines._STOCK.values():
        for source in sources.values():
            name = source.module.format(layout=stock.layout_of(root / "vllm"))
            tree = ast.parse(root.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
            assert source.symbol in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


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


def test_what_stock_leaves_undefined_is_only_asked_of_the_overlay():
    workloads = workloads_of("ragged")
    case = next(case for case in workloads.cases("smoke") if case.name == "swa-decode")
    inputs = workloads.make_inputs(case, "cpu")
    want = workloads.expected(case, inputs)

    def leaves_the_rest(**arguments):
        flat, indptr = workloads.reference.build_ragged(**arguments)
        flat[indptr[-1] :] = 12345
        return flat, indptr

    outcomes = [
        bench_worker.check(workloads, case, inputs, baselines.Provider(name, leaves_the_rest), want)[0]
        for name in ("overlay", "stock")
    ]
    assert outcomes == [Status.FAILED, Status.PASSED]


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0", "0.33.0"])
def test_every_call_of_stock_names_what_its_release_asks_for(real_release, version):
    """All arguments without a default are given, of whatever each release calls them."""
    import ast

    root = real_release(version)
    for op, sources in baselines._STOCK.items():
        workloads = workloads_of(op)
        inputs = workloads.make_inputs(workloads.bench_cases()[0], "meta")
        for name, source in sources.items():
            module = source.module.format(layout=stock.layout_of(root / "vllm"))
            tree = ast.parse(root.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
            (function,) = [
                one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == source.symbol
            ]
            needed = {one.arg for one in function.args.args[: -len(function.args.defaults) or None]}
            assert needed <= set(workloads.call_kwargs(inputs, name)), (op, name)


def test_a_red_provider_is_never_timed():
    workloads = workloads_of("combine")
    case = next(case for case in workloads.cases("smoke") if case.name == "two-requests")
    inputs = workloads.make_inputs(case, "cpu")

    def wrong(**arguments):
        indices, lens = workloads.reference.combine(**arguments)
        return indices, lens + 1

    want = workloads.expected(case, inputs)
    status, reason = bench_worker.check(workloads, case, inputs, baselines.Provider("stock", wrong), want)
    assert status is Status.FAILED and reason.startswith("lens:")

    def unhappy(**_arguments):
        raise RuntimeError("no")

    outcome = bench_worker.check(workloads, case, inputs, baselines.Provider("stock", unhappy), want)
    assert outcome == (Status.RUNTIME_ERROR, "RuntimeError: no")
    right = baselines.Provider("stock", workloads.reference.combine)
    assert bench_worker.check(workloads, case, inputs, right, want) == (Status.PASSED, "")


def test_stock_mhc_may_round_another_way_but_not_compute_another_thing():
    workloads = workloads_of("mhc_post")
    case = next(case for case in workloads.cases("smoke") if case.name == "own-output")
    inputs = workloads.make_inputs(case, "cpu")
    want = workloads.expected(case, inputs)
    oracle = workloads.reference.mhc_post

    def outcome(function, provider=baselines.STOCK):
        return bench_worker.check(workloads, case, inputs, baselines.Provider(provider, function), want)[0]

    def one_step(**arguments):
        residual = oracle(**arguments)
        bits = residual.view(torch.int16)
        bits[0, 0, :7] += 1
        return residual

    def without_post(**arguments):
        return oracle(**{**arguments, "post_layer_mix": arguments["post_layer_mix"] * 0})

    assert outcome(oracle) is Status.PASSED
    assert outcome(one_step) is Status.PASSED
    assert outcome(without_post) is Status.FAILED
    assert outcome(one_step, bench_worker.OVERLAY) is Status.FAILED


def test_stock_keys_may_round_another_way_now_and_then():
    workloads = workloads_of("indexer_k")
    case = next(case for case in workloads.cases("smoke") if case.name == "ratio-1")
    oracle = workloads.reference.indexer_k

    def outcome(function, provider=baselines.STOCK):
        inputs = workloads.make_inputs(case, "cpu")
        want = workloads.expected(case, inputs)
        return bench_worker.check(workloads, case, inputs, baselines.Provider(provider, function), want)[0]

    def codes(inputs):
        slot = int(inputs["slot_mapping"].max())
        return inputs["k_cache"][slot // 64].view(-1)[slot % 64 * 128 :][:128]

    def one_step(**arguments):
        oracle(**arguments)
        codes(arguments)[3] ^= 1

    def two_steps(**arguments):
        oracle(**arguments)
        codes(arguments)[3] ^= 2

    def unrotated(**arguments):
        table = torch.cat([torch.ones(4000, 32), torch.zeros(4000, 32)], dim=1)
        oracle(**{**arguments, "cos_sin_cache": table})

    assert outcome(oracle) is Status.PASSED
    assert outcome(one_step) is Status.PASSED
    assert outcome(one_step, bench_worker.OVERLAY) is Status.FAILED
    assert outcome(two_steps) is Status.FAILED
    assert outcome(unrotated) is Status.FAILED
