"""The bindings of the e4m3 writers: the releases' own signatures and call expressions, with tensors as their callers make them."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fakes import RELEASES

from .conftest import definition, parsed, real_stub

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = [pytest.mark.kernels, pytest.mark.release]
INSERT, STORE, QUERIES = "rope_quant_insert", "indexer_k_norm_rope_store", "fused_indexer_q_rope_quant"
V41 = "vllm.models.deepseek_v41"
MODULES = {
    INSERT: f"{V41}.common.ops.fused_compress_quant_cache",
    STORE: f"{V41}.common.ops.indexer_k_store",
    QUERIES: "vllm.models.deepseek_v4.common.ops.fused_indexer_q",
}
OPS = {INSERT: "kv_insert", STORE: "indexer_k", QUERIES: "indexer_q"}
# the only callers of a release whose path SM8x takes
CALLERS = {
    INSERT: "models/deepseek_v41/compressor.py",
    STORE: "models/deepseek_v41/attention.py",
    QUERIES: "models/deepseek_v41/attention.py",
}
TOKENS, HEADS = 6, 32


def rows(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.bfloat16)


def pages(record: int) -> Any:
    """A layer's pages in a block that other layers share, as vLLM lays them out for SM8x."""
    return torch.zeros((5, 57_600), dtype=torch.uint8).as_strided((5, 64, record), (57_600, record, 1))


def written() -> dict[str, Any]:
    """What a caller's expression stands for, by its last name."""
    return {
        "latent": rows(TOKENS, 512),
        "positions": torch.arange(TOKENS),
        "cos_sin_cache": torch.zeros((999, 64)),
        "slot_mapping": torch.arange(TOKENS),
        "compress_ratio": 2,
        "fp8_scale": None,
        "k_pre": rows(TOKENS, 128),
        "weight": rows(128),
        "variance_epsilon": 1e-20,
        "use_fp4_kv": False,
        "q": rows(TOKENS, HEADS, 128),
        "indexer_weights": rows(TOKENS, HEADS),
        "softmax_scale": 128**-0.5,
        "self.n_head ** -0.5": HEADS**-0.5,
        "indexer_weights_dtype": torch.float32,
    }


@pytest.fixture
def bound(payload, vllm, release_tree, monkeypatch, request) -> SimpleNamespace:
    """A release's three modules, bound; `launched` keeps what the ops would launch."""
    tree = release_tree(request.param)
    made = SimpleNamespace(launched={}, tree=tree, release=request.param, payload=payload)
    warm = importlib.import_module(f"{payload.__name__}.warm")
    made.warmed = []
    monkeypatch.setattr(warm, "first_call", made.warmed.append)
    for symbol, name in MODULES.items():
        op = OPS[symbol]
        kernel = importlib.import_module(f"{payload.__name__}.ops.{op}.triton")
        monkeypatch.setattr(
            kernel, "launch", lambda *args, op=op: made.launched.setdefault(op, []).append(args)
        )
        module = vllm.module(name, "import torch\n" + real_stub(tree / path_of(name), symbol))
        made.__dict__[symbol] = getattr(module, symbol)
        payload.bind(name)
        made.__dict__[op] = getattr(module, symbol)
    return made


every_release = pytest.mark.parametrize("bound", RELEASES, indirect=True)


def path_of(module: str) -> str:
    return module.removeprefix("vllm.").replace(".", "/") + ".py"


def call_in(tree: Path, symbol: str) -> ast.Call:
    """The one call of the symbol in its caller's file."""
    (call,) = [
        node
        for node in ast.walk(parsed(tree / CALLERS[symbol]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == symbol
    ]
    return call


def value_of(expression: ast.expr, symbol: str) -> Any:
    text = ast.unparse(expression).replace("(", "").replace(")", "")
    if text.endswith("kv_cache"):
        return pages(584 if symbol == INSERT else 132)
    values = written()
    return values[text] if text in values else values[text.rpartition(".")[2]]


def made_call(bound: SimpleNamespace, symbol: str, **changed: Any) -> tuple[Any, dict[str, Any]]:
    """Makes the caller's own call; returns its result and what it passed, by the stock function's names."""
    call = call_in(bound.tree, symbol)
    positional = [value_of(one, symbol) for one in call.args]
    keywords = {str(one.arg): value_of(one.value, symbol) for one in call.keywords}
    passed = inspect.signature(vars(bound)[symbol]).bind(*positional, **keywords).arguments
    if changed:
        return vars(bound)[OPS[symbol]](**{**passed, **changed}), dict(passed)
    return vars(bound)[OPS[symbol]](*positional, **keywords), dict(passed)


@every_release
def test_signatures_are_kept(bound):
    for symbol, op in OPS.items():
        stock, ours = vars(bound)[symbol], vars(bound)[op]
        assert ours is not stock and ours.__deepinfer__ == {"op": op, "stock": stock}
        assert str(inspect.signature(ours)) == str(inspect.signature(stock))


@every_release
def test_the_insert_of_the_release_reaches_the_op(bound):
    result, sent = made_call(bound, INSERT)
    assert result is None and bound.warmed == ["kv_insert"]
    ((latent, positions, table, cache, slots, ratio),) = bound.launched["kv_insert"]
    assert latent is sent["latent"] and positions is sent["positions"] and table is sent["cos_sin_cache"]
    assert cache is sent["kv_cache"] and slots is sent["slot_mapping"] and ratio == 2


@every_release
def test_the_key_store_of_the_release_reaches_the_op(bound):
    result, sent = made_call(bound, STORE)
    assert result is None and bound.warmed == ["indexer_k"]
    ((keys, positions, table, weight, eps, cache, slots, ratio),) = bound.launched["indexer_k"]
    assert keys is sent["k_pre"] and positions is sent["positions"] and table is sent["cos_sin_cache"]
    assert weight is sent["rms_norm_weight"] and eps == 1e-20 and ratio == 2
    assert cache is sent["k_cache"] and slots is sent["kv_slot_mapping"]


@every_release
def test_the_queries_of_the_release_reach_the_op(bound):
    (codes, weights), sent = made_call(bound, QUERIES)
    assert bound.warmed == ["indexer_q"]
    ((positions, q, table, given, factor, stored, folded),) = bound.launched["indexer_q"]
    assert positions is sent["positions"] and q is sent["index_q"] and given is sent["index_weights"]
    assert table is sent["index_q_cos_sin_cache"] and factor == pytest.approx(2.0**-6, rel=1e-12)
    # what the callers hand on: values of the platform's fp8 type, and weights with every factor but the keys' scales
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == q.shape and codes.is_contiguous()
    assert codes.data_ptr() == stored.data_ptr()
    assert weights is folded and weights.dtype == torch.float32 and weights.shape == given.shape
    assert ("weights_out_dtype" in sent) is (bound.release != "0.30.0")


@every_release
def test_calls_in_a_cuda_graph_neither_copy_nor_wait(bound):
    class Recorded(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(function.name().partition(".")[0])
            return function(*args, **(kwargs or {}))

    calls = [(vars(bound)[OPS[symbol]], made_call(bound, symbol)[1]) for symbol in OPS]
    with Recorded() as seen:
        for function, arguments in calls:
            function(**arguments)
    assert seen.names <= {"aten::empty", "aten::view", "aten::alias", "aten::detach"}


@every_release
@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros((5, 64, 528), dtype=torch.uint8),
        torch.zeros((5, 64, 288), dtype=torch.uint8),
        rows(5, 64, 512),
        torch.zeros((5, 64, 512), dtype=torch.uint8).view(torch.float8_e4m3fn),
    ],
    ids=["mxfp8", "nvfp4", "bf16", "fp8"],
)
def test_other_records_are_refused(bound, cache):
    with pytest.raises(
        ValueError, match=rf"KV rows of {cache.shape[-1]} x {cache.dtype} are not used on SM8x"
    ):
        made_call(bound, INSERT, kv_cache=cache)
    assert bound.launched == {}


@every_release
def test_a_scale_for_the_tensor_is_refused(bound):
    with pytest.raises(ValueError, match="not used on SM8x"):
        made_call(bound, INSERT, fp8_scale=torch.ones(1))


@every_release
def test_mxfp4_is_refused(bound):
    with pytest.raises(ValueError, match=r"MXFP4 indexer cache needs compute capability 10"):
        made_call(bound, STORE, use_fp4_cache=True)
    with pytest.raises(ValueError, match=r"MXFP4 with weights in torch.float32 need compute capability 10"):
        made_call(bound, QUERIES, use_fp4=True)
    assert bound.launched == {}


@pytest.mark.parametrize("bound", [one for one in RELEASES if one != "0.30.0"], indirect=True)
def test_weights_in_bf16_are_refused(bound):
    with pytest.raises(ValueError, match=r"weights in torch.bfloat16 need compute capability 10"):
        made_call(bound, QUERIES, weights_out_dtype=torch.bfloat16)


@every_release
def test_no_tokens(bound):
    made_call(bound, INSERT, slot_mapping=torch.arange(0))
    made_call(bound, STORE, kv_slot_mapping=torch.arange(0))
    empty = {"positions": torch.arange(0), "index_q": rows(0, HEADS, 128), "index_weights": rows(0, HEADS)}
    (codes, weights), _ = made_call(bound, QUERIES, **empty)
    assert codes.shape == (0, HEADS, 128) and weights.shape == (0, HEADS)
    assert bound.launched == {}


def test_a_default_that_is_another_type_is_refused(payload, vllm):
    needed = "positions, index_q, index_q_cos_sin_cache, index_weights"
    needed += ", index_weights_softmax_scale, index_weights_head_scale"
    optional = "use_fp4=False, weights_out_dtype=torch.bfloat16"
    source = f"import torch\ndef {QUERIES}({needed}, {optional}): ...\n"
    vllm.module(MODULES[QUERIES], source)
    with pytest.raises(payload.BindError, match="weights_out_dtype is"):
        payload.bind(MODULES[QUERIES])


@pytest.mark.parametrize("release", RELEASES)
def test_nobody_else_on_this_path_holds_the_functions(release_tree, release):
    """Who imports a writer by name: where it is defined, where it is passed on, the callers above, and V4's own indexer."""
    tree = release_tree(release)
    passed_on = {"models/deepseek_v41/common/ops/__init__.py", "models/deepseek_v4/common/ops/__init__.py"}
    elsewhere = {
        # another function of that name, of the plain DSA indexer
        "model_executor/models/deepseek_v2.py",
        "models/deepseek_v4/attention.py",
        # compute capability 10.3 alone
        "models/deepseek_v41/nvidia/specialized_decode/attention/indexer.py",
    }
    found = set()
    for file in sorted(tree.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if any(symbol in text for symbol in OPS):
            found |= {
                (alias.name, file.relative_to(tree).as_posix())
                for node in ast.walk(parsed(file))
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
                if alias.name in OPS
            }
    assert {(symbol, file) for symbol, file in found if file not in passed_on | elsewhere} == set(
        CALLERS.items()
    )


def test_kernels_of_the_writers_are_not_in_vllms_warm_up(release_tree):
    """Else vLLM would compile stock's fp8 kernels at start-up: only V4's attention registers the queries' kernel."""
    for release in RELEASES:
        tree = release_tree(release)
        attention = (tree / "models/deepseek_v41/attention.py").read_text(encoding="utf-8")
        assert "register_warmup" in attention
        assert not {"_FUSED_INDEXER_Q_ROPE", "_INDEXER_Q_FP8_KERNEL"} & {
            node.id for node in ast.walk(ast.parse(attention)) if isinstance(node, ast.Name)
        }
        for name in (INSERT, STORE):
            file = tree / path_of(MODULES[name])
            assert "VllmTritonJitKernel" not in file.read_text(encoding="utf-8")
            assert definition(file, name) is not None


def test_packed_scales_are_of_capability_10_alone(release_tree):
    """0.33's keys may carry another scale: the question is asked of the platform, and says no on SM8x."""
    node = definition(release_tree("0.33.0") / "utils/deep_gemm.py", "mqa_logits_use_mx_scales")
    assert node is not None
    (answer,) = [one for one in node.body if isinstance(one, ast.Return)]
    calls = [ast.unparse(one) for one in ast.walk(answer) if isinstance(one, ast.Call)]
    assert "current_platform.is_device_capability_family(100)" in calls
    assert isinstance(answer.value, ast.BoolOp) and isinstance(answer.value.op, ast.And)


def test_modules_are_importable_without_torch(payload):
    for name in ("fused_compress_quant_cache", "indexer_k_store", "fused_indexer_q"):
        module = importlib.import_module(f"{payload.__name__}.bindings.{name}")
        assert isinstance(module, ModuleType) and "torch" not in vars(module)
