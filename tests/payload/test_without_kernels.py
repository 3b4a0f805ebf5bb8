"""Ops that replace functions without a kernel of their own, against the code of the four real releases."""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fakes import RELEASES

from .conftest import COMBINE, ROCM, defines, definition, parsed, real_stub, stub

COMMON = "vllm.v1.attention.ops.common"
METADATA = "vllm.v1.attention.backends.mla.indexer"
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
SWA = "vllm.v1.attention.backends.mla.sparse_swa"
DEEP_GEMM = "vllm.utils.deep_gemm"
PLANS = "DeepseekSparseSWAMetadataBuilder.build_tile_scheduler"
CACHE = "DeepseekV4SWACache.__init__"
SYMBOLS = {COMMON: ("pack_seq_triton", "PackSeqTritonKernel.get_warmup_keys"), SWA: (PLANS, CACHE)}
LAYER_TYPES = (
    "_LAYER_TYPE_SWAONLY",
    "_LAYER_TYPE_C4A",
    "_LAYER_TYPE_C128A",
    "_LAYER_TYPE_C1A",
    "_LAYER_TYPE_C2A",
)
pytestmark = pytest.mark.release


def path_of(module: str) -> str:
    return module.removeprefix("vllm.").replace(".", "/") + ".py"


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tree(release, release_tree) -> Path:
    return release_tree(release)


@pytest.fixture
def stubs(tree, vllm) -> Callable[[str], ModuleType]:
    """Module → its replaced symbols with the release's signatures."""

    def make(name: str) -> ModuleType:
        source = "".join(real_stub(tree / path_of(name), symbol) for symbol in SYMBOLS[name])
        return vllm.module(name, source)

    return make


def held(owner: Any, symbol: str) -> Any:
    for part in symbol.split("."):
        owner = getattr(owner, part)
    return owner


def real(file: Path, name: str, scope: dict[str, Any]) -> Any:
    """The release's own function or method `name`, run in `scope`; annotations and decorators dropped."""
    node = definition(file, name)
    assert node is not None, name
    copy = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(copy, ast.FunctionDef)
    copy.decorator_list, copy.returns = [], None
    for argument in [*copy.args.args, *copy.args.kwonlyargs]:
        argument.annotation = None
    for inner in ast.walk(copy):
        if isinstance(inner, ast.AnnAssign):
            inner.annotation = ast.Constant(value=None)
    exec(compile(ast.fix_missing_locations(ast.Module([copy], [])), str(file), "exec"), scope)
    return scope[copy.name]


@pytest.mark.parametrize("name", SYMBOLS)
def test_signatures_are_kept(payload, stubs, name):
    module = stubs(name)
    before = {symbol: str(inspect.signature(held(module, symbol))) for symbol in SYMBOLS[name]}
    payload.bind(name)
    assert {symbol: str(inspect.signature(held(module, symbol))) for symbol in SYMBOLS[name]} == before
    assert all(hasattr(held(module, symbol), "__deepinfer__") for symbol in SYMBOLS[name])


@pytest.mark.parametrize("name", SYMBOLS)
def test_a_new_parameter_is_refused(payload, vllm, tree, name):
    for symbol in SYMBOLS[name]:
        others = [real_stub(tree / path_of(name), other) for other in SYMBOLS[name] if other != symbol]
        changed = real_stub(tree / path_of(name), symbol).replace("):\n", ", more=0):\n", 1)
        vllm.module(name, "".join([changed, *others]))
        with pytest.raises(payload.BindError, match=f"{symbol}.*added: more"):
            payload.bind(name)


class Packer:
    """Stands for stock's kernel: packs rows in torch, in the tensors' own type."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, x: Any, out: Any, lengths: Any, **more: Any) -> None:
        self.calls.append({"x": x, **more})
        out.fill_(more["pad_value"])
        start = 0
        for row, length in enumerate(lengths.tolist()):
            out[row, :length] = x[start : start + length]
            start += length


@pytest.fixture
def packed(payload, vllm, tree) -> SimpleNamespace:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    module = vllm.module(COMMON, real_stub(tree / path_of(COMMON), SYMBOLS[COMMON][1]))
    kernel = Packer()
    vars(module).update(torch=torch, _PACK_SEQ_TRITON_KERNEL=kernel)
    real(tree / path_of(COMMON), "pack_seq_triton", vars(module))
    payload.bind(COMMON)
    return SimpleNamespace(pack=module.pack_seq_triton, kernel=kernel, module=module)


@pytest.mark.kernels
def test_e4m3_rows_are_packed_as_bytes(packed):
    import torch

    rows = (torch.randn(9, 4, 128) * 40).to(torch.float8_e4m3fn)
    lengths = torch.tensor([2, 0, 3, 1, 3], dtype=torch.int32)
    out = packed.pack(rows, lengths)
    assert (out.dtype, tuple(out.shape)) == (torch.float8_e4m3fn, (5, 3, 4, 128))
    (call,) = packed.kernel.calls
    assert (call["x"].dtype, call["pad_is_uint8"]) == (torch.uint8, True)
    # what Triton makes of minus infinity where it has the type
    assert call["pad_value"] == 0xFE and type(call["pad_value"]) is int
    codes = out.view(torch.uint8)
    assert torch.equal(codes[2], rows[2:5].view(torch.uint8))
    assert torch.equal(codes[3, :1], rows[5:6].view(torch.uint8))
    assert (codes[1] == 0xFE).all() and (codes[3, 1:] == 0xFE).all()


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("pad", "code"), [(0, 0), (0.0, 0), (1.0, 0x38), (448.0, 0x7E), (float("inf"), 0x7E)]
)
def test_other_pads(packed, pad, code):
    import torch

    rows = torch.zeros(1, 128).to(torch.float8_e4m3fn)
    packed.pack(rows, torch.tensor([1, 0]), pad_value=pad)
    assert packed.kernel.calls[0]["pad_value"] == code


@pytest.mark.kernels
def test_other_types_are_stocks(packed):
    import torch

    for rows, pad in ((torch.zeros(3, 8), -1.5), (torch.zeros(3, 8, dtype=torch.uint8), 7)):
        packed.kernel.calls.clear()
        packed.pack(rows, torch.tensor([1, 2]), pad, 32, 16)
        (call,) = packed.kernel.calls
        assert call["x"].dtype == rows.dtype and call["pad_value"] == pad
        assert (call["block_t"], call["block_d"]) == (32, 16)


@pytest.mark.kernels
def test_the_warm_up_is_for_bytes(packed):
    import torch

    keys = packed.module.PackSeqTritonKernel().get_warmup_keys
    tag, received = keys(dtype=torch.float8_e4m3fn, pad_value=-float("inf"))
    assert (tag, received["dtype"], received["pad_value"]) == ("stock", torch.uint8, 0xFE)
    _, received = keys(dtype=torch.uint8, pad_value=0)
    assert (received["dtype"], received["pad_value"]) == (torch.uint8, 0)


def test_the_indexer_registers_what_it_packs(tree):
    """The constructor's registration and the calls agree: the type and the pad of the variant that is warmed up."""
    source = (tree / path_of(INDEXER)).read_text(encoding="utf-8")
    assert "torch.uint8 if use_fp4_cache else current_platform.fp8_dtype()" in source
    calls = [node for node in ast.walk(parsed(tree / path_of(INDEXER))) if called(node, "pack_seq_triton")]
    assert len(calls) == 3
    assert {len(call.args) for call in calls} == {2}


def called(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def guards(file: Path, name: str) -> Iterator[list[str]]:
    """The conditions above each call of `name`, innermost last."""

    def walk(node: ast.AST, above: list[str]) -> Iterator[list[str]]:
        if called(node, name):
            yield above
        for field, value in ast.iter_fields(node):
            test = [ast.unparse(node.test)] if isinstance(node, ast.If) and field == "body" else []
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, [*above, *test])

    yield from walk(parsed(file), [])


@pytest.fixture
def deep_gemm(vllm) -> ModuleType:
    return vllm.module(DEEP_GEMM, "def has_deep_gemm():\n    return 'stock'\n")


IMPORT = f"from {DEEP_GEMM} import has_deep_gemm\n"


def test_no_schedule_is_asked_for_without_deep_gemm(tree, release):
    asked = list(guards(tree / path_of(METADATA), "get_paged_mqa_logits_metadata"))
    assert len(asked) == (2 if release in RELEASES[2:] else 1)
    assert all(above[-1] == "current_platform.is_cuda() and has_deep_gemm()" for above in asked)


def test_the_metadata_knows_no_deep_gemm(payload, vllm, deep_gemm, tree):
    """And what follows from it is what stock says of an SM8x device that has it."""
    platform = SimpleNamespace(is_cuda=lambda: True, is_device_capability_family=lambda family: family == 80)
    module = vllm.module(METADATA, IMPORT)
    vars(module)["current_platform"] = platform
    names = (
        "_supports_varlen_paged_mqa_logits",
        "_supports_flattened_device_query_lens",
        "_supports_native_decode",
    )
    for name in names:
        real(tree / path_of(METADATA), name, vars(module))
    varlen, flattened, native = (vars(module)[name] for name in names)
    deep_gemm.has_deep_gemm.__code__ = (lambda: True).__code__
    before = [varlen(), flattened(), *map(native, range(1, 9))]
    payload.bind(METADATA, skip=())
    assert module.has_deep_gemm() is False
    assert [varlen(), flattened(), *map(native, range(1, 9))] == before
    # the other modules' answer is not touched
    assert deep_gemm.has_deep_gemm() is True


def test_the_constructor_is_the_only_one_that_asks(tree):
    asked = list(guards(tree / path_of(INDEXER), "has_deep_gemm"))
    assert len(asked) == 1
    node = definition(tree / path_of(INDEXER), "SparseAttnIndexer.__init__")
    tests = [
        one for one in ast.walk(node) if isinstance(one, ast.If) and "has_deep_gemm" in ast.unparse(one.test)
    ]
    assert [ast.unparse(one.test) for one in tests] == [
        "current_platform.is_cuda() and (not has_deep_gemm())"
    ]
    assert all(isinstance(one, ast.Raise) for one in tests[0].body)


LOGITS = "def fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k): ...\n"
PAGED = (
    "def fp8_fp4_paged_mqa_logits(q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, "
    "indices=None): ...\n"
)


@pytest.mark.parametrize("off", ["", "indexer_prefill", "indexer_decode", "indexer_prefill,indexer_decode"])
def test_the_indexer_needs_no_deep_gemm_where_both_logits_are_ours(
    payload, vllm, deep_gemm, monkeypatch, off
):
    exec(LOGITS + PAGED, vars(deep_gemm))
    module = vllm.module(INDEXER, IMPORT[:-1] + ", fp8_fp4_mqa_logits, fp8_fp4_paged_mqa_logits\n")
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", off)
    payload.bind(INDEXER)
    assert module.has_deep_gemm() == ("stock" if off else True)
    assert deep_gemm.has_deep_gemm() == "stock"


def test_a_name_that_is_not_the_origins_is_refused(payload, vllm, deep_gemm):
    vllm.module(METADATA, "def has_deep_gemm():\n    return True\n")
    with pytest.raises(payload.BindError, match=f"not what {DEEP_GEMM} has"):
        payload.bind(METADATA)
    vllm.module(METADATA, "")
    with pytest.raises(payload.BindError, match=r"has_deep_gemm .* is missing"):
        payload.bind(METADATA)
    module = vllm.module(METADATA, IMPORT)
    payload.bind(METADATA)
    bound = module.has_deep_gemm
    payload.bind(METADATA)
    assert module.has_deep_gemm is bound


@pytest.fixture
def window(payload, vllm, tree) -> ModuleType:
    """The window's module: the release's own `build_tile_scheduler`, a cache that keeps what it was made with."""
    module = vllm.module(SWA, real_stub(tree / path_of(SWA), PLANS) + real_stub(tree / path_of(SWA), CACHE))

    def unavailable() -> None:
        raise RuntimeError("FlashMLA is not available")

    no = SimpleNamespace(
        is_rocm=lambda: False, is_xpu=lambda: False, is_device_capability_family=lambda _: False
    )
    scope = {**{name: name for name in LAYER_TYPES}, "current_platform": no, "get_mla_metadata": unavailable}
    scope["__name__"] = SWA
    vars(module)["get_current_vllm_config"] = lambda: configuration(1)
    function = real(tree / path_of(SWA), PLANS, scope)
    module.DeepseekSparseSWAMetadataBuilder.build_tile_scheduler = function

    source = real_stub(tree / path_of(SWA), CACHE).replace(
        "return 'stock', dict(locals())", "self.made = dict(locals())"
    )
    exec(source, vars(module))
    return module


def test_decode_gets_no_plans(payload, window):
    builder = window.DeepseekSparseSWAMetadataBuilder()
    builder._layer_types = {"_LAYER_TYPE_SWAONLY", "_LAYER_TYPE_C1A"}
    with pytest.raises(RuntimeError, match="FlashMLA"):
        builder.build_tile_scheduler(3)
    payload.bind(SWA)
    assert builder.build_tile_scheduler(3) == dict.fromkeys(LAYER_TYPES)


def test_nobody_on_the_way_reads_a_plan(tree, release):
    """Whoever reads one is a class that is not chosen on SM8x, or carries it from one place to the other."""
    readers = set()
    for folder in ("models/deepseek_v41", "v1/attention", "v1/worker", "v1/spec_decode"):
        for file in sorted((tree / folder).rglob("*.py")):
            if "tile_sched_" not in file.read_text(encoding="utf-8"):
                continue
            for node in ast.walk(parsed(file)):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr.startswith("tile_sched_")
                    and isinstance(node.ctx, ast.Load)
                ):
                    readers.add(file.relative_to(tree).as_posix())
    assert readers == {"models/deepseek_v41/nvidia/flashmla.py"}


def configuration(stages: int) -> Any:
    model = SimpleNamespace(kv_source_layer_ids=[2, 8, 14, 20], num_hidden_layers=40)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        model_config=SimpleNamespace(hf_config=model),
    )


ARGUMENTS = {
    "head_dim": 512,
    "window_size": 128,
    "dtype": "uint8",
    "prefix": "p",
    "cache_config": "c",
    "block_size": 32,
}


@pytest.mark.parametrize("loaded", ["nothing", "own", "own, bound", "common"])
@pytest.mark.parametrize("asked", [True, False])
def test_replay_is_off_where_prefill_reads_before_it(
    payload, vllm, window, release, loaded, asked, ops, caplog
):
    common = vllm.module(
        "vllm.models.deepseek_v41.common.ops.cache_utils", stub(COMBINE, "topk_indices, out=None")
    )
    arguments = (
        "topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N"
    )
    if loaded.startswith("own"):
        vllm.module(ROCM, stub(COMBINE, arguments))
        if "bound" in loaded:
            payload.bind(ROCM)
    elif loaded == "common":
        vars(vllm.module(ROCM, ""))[COMBINE] = vars(common)[COMBINE]
    payload.bind(SWA)
    kwargs = {} if release == "0.30.0" else {"bounded_replay": asked}
    with caplog.at_level(logging.WARNING):
        made = [window.DeepseekV4SWACache(**ARGUMENTS, **kwargs).made for _ in range(2)]
    if release == "0.30.0":
        assert "bounded_replay" not in made[0]
        return
    assert made[0]["bounded_replay"] is (asked and not loaded.startswith("own"))
    assert {name: made[0][name] for name in ARGUMENTS} == ARGUMENTS
    said = [record for record in caplog.records if "replay is off" in record.message]
    assert len(said) == (asked and loaded.startswith("own"))


@pytest.mark.parametrize(
    ("partition", "replays"),
    [("20,20", False), ("14,6,20", False), ("14,26", True), ("40", True)],
)
def test_replay_is_off_where_a_stage_begins_with_it(
    payload, vllm, tree, window, release, partition, replays, monkeypatch, caplog
):
    if release == "0.30.0":
        pytest.skip("0.30.0 has no replay")
    utils = vllm.module("vllm.distributed.utils", "")
    scope = {"envs": SimpleNamespace(VLLM_PP_LAYER_PARTITION=partition), "logger": logging.getLogger("stock")}
    vars(utils)["get_pp_indices"] = real(tree / "distributed/utils.py", "get_pp_indices", scope)
    stages = len(partition.split(","))
    vars(window)["get_current_vllm_config"] = lambda: configuration(stages)
    payload.bind(SWA)
    with caplog.at_level(logging.WARNING):
        made = [window.DeepseekV4SWACache(**ARGUMENTS, bounded_replay=True).made for _ in range(2)]
    assert [one["bounded_replay"] for one in made] == [replays] * 2
    said = [record.message for record in caplog.records if "replay is off" in record.message]
    assert len(said) == (not replays) and all("begins with layer 20" in text for text in said)


def test_the_releases_cannot_begin_a_stage_with_the_replay(tree, release):
    """What that choice rests on: layers run before the replay, and at least one is needed."""
    text = ast.unparse(parsed(tree / "models/deepseek_v41/nvidia/model.py"))
    asserted = "range(self.start_layer, self.decoder_replay_start)" in text
    assert asserted is (release in RELEASES[2:])
    if asserted:
        assert "assert residual is not None and post_mix is not None" in text


def test_the_cache_gets_every_argument_as_it_was(payload, window):
    names = list(inspect.signature(window.DeepseekV4SWACache.__init__).parameters)[1:]
    payload.bind(SWA)
    values: dict[str, Any] = {name: f"<{name}>" for name in names}
    if "bounded_replay" in names:
        values["bounded_replay"] = True
    made = window.DeepseekV4SWACache(**values).made
    assert {name: made[name] for name in names} == values
    again = window.DeepseekV4SWACache(*values.values()).made
    assert {name: again[name] for name in names} == values


def test_which_releases_have_a_combiner_that_reads_before_the_replay(tree, release):
    """What the choice rests on, read in the releases' own code."""
    own = defines(tree / path_of(ROCM), COMBINE)
    assert own is (release in RELEASES[:2])
    prefill = ast.unparse(
        definition(tree / path_of(ROCM), "DeepseekV41ROCMAiterMLAAttention._forward_prefill")
    )
    # the window is gathered from where the metadata says that it begins, and combined with the same lengths
    assert "gather_lens=gather_lens[chunk_start:chunk_end]" in prefill and f"{COMBINE}(" in prefill
    if release != "0.30.0":
        metadata = ast.unparse(definition(tree / path_of(SWA), "DeepseekSparseSWAMetadataBuilder.build"))
        assert metadata.count("replay_start") >= 4
    if own:
        body = ast.unparse(definition(tree / path_of(ROCM), COMBINE))
        assert "gather_lens" in body and "torch.maximum(swa_start, gather_start)" not in body


def test_a_process_that_has_not_loaded_the_attention_class_imports_nothing(payload, window, vllm):
    payload.bind(SWA)
    before = set(sys.modules)
    window.DeepseekV4SWACache(**ARGUMENTS)
    assert not [name for name in set(sys.modules) - before if name.startswith("vllm")]
