"""What the sparse attention and mHC adapters do beside passing arguments on: stock's share, rotation, dense rows."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from deepinfer_sm80 import bindings

from .conftest import BUILD, DECODE, MHC, PREFILL, SPARSE, WARMUP, Argument, LoadedVllm, stub

HEAD = {"head_dim": 512, "nope_head_dim": 448, "rope_head_dim": 64}
PREFILL_ARGS = (
    "q, kv, indices, topk_length, scale, head_dim, nope_head_dim, rope_head_dim, attn_sink, output, "
    "ragged_indices=None, ragged_indptr=None"
)
DECODE_030 = (
    "q, kv_cache, swa_k_cache, swa_only, topk_indices, topk_lens, swa_indices, swa_lens, swa_ragged_indices, "
    "swa_ragged_indptr, topk_ragged_indices, topk_ragged_indptr, attn_sink, scale, head_dim, nope_head_dim, "
    "rope_head_dim, output, extra_cache_nan_free=False, adaptive_splits=False"
)
DECODE_031 = f"{DECODE_030}, inv_rope_positions=None, inv_rope_cos_sin_cache=None, output_mxfp8=None"
PRE = "mhc_pre_delayed_tilelang"
FUSED = "mhc_fused_post_pre_delayed_tilelang"
POST = "mhc_post_tilelang"
PRE_ARGS = (
    "residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, "
    "pre_mix=None, x=None, norm_weight=None, norm_eps=1e-6"
)
FUSED_ARGS = (
    "x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, "
    "hc_post_mult_value, sinkhorn_repeat, pre_mix=None, norm_weight=None, norm_eps=1e-6, capture_aux=False"
)
POST_ARGS = "x, residual, post_layer_mix, comb_res_mix"
WARMUP_SOURCE = (
    "class MHCPreNormKernel:\n    def compile_many(self, compile_keys):\n        return list(compile_keys)\n"
)


def sparse_source(decode: str) -> str:
    build = stub(BUILD, "indices, lengths, num_rows=-1", ["_count_valid_row_entries_kernel"])
    return build + stub(PREFILL, PREFILL_ARGS) + stub(DECODE, decode)


def call(function: Callable[..., Any], **changed: Any) -> Any:
    """Every parameter without a default gets a marker."""
    names = [name for name, one in inspect.signature(function).parameters.items() if one.default is one.empty]
    return function(**{**{name: HEAD.get(name, Argument(name)) for name in names}, **changed})


@pytest.fixture
def sparse(payload, vllm: LoadedVllm, ops, no_torch) -> Callable[[str], ModuleType]:
    def make(decode: str = DECODE_031, **options: Any) -> ModuleType:
        module = vllm.module(SPARSE, sparse_source(decode))
        payload.bind(SPARSE, **options)
        return module

    return make


@pytest.fixture
def mhc(payload, vllm: LoadedVllm, ops) -> SimpleNamespace:
    source = stub(PRE, PRE_ARGS) + stub(FUSED, FUSED_ARGS) + stub(POST, POST_ARGS)
    made = SimpleNamespace(
        functions=vllm.module(MHC, source), warmup=vllm.module(WARMUP, WARMUP_SOURCE), bind=payload.bind
    )
    return made


def test_ragged_rows_of_prefill_go_as_they_are(sparse, ops):
    module = sparse()
    indices, indptr = Argument("ragged_indices"), Argument("ragged_indptr")
    assert call(getattr(module, PREFILL), indices=None, ragged_indices=indices, ragged_indptr=indptr) is None
    (received,) = ops.sparse_prefill.calls
    assert (received["indices"], received["indptr"], received["lengths"]) == (indices, indptr, None)


def test_half_a_ragged_list_is_none_as_in_stock(sparse, ops):
    module = sparse()
    dense = Argument("indices")
    call(getattr(module, PREFILL), indices=dense, ragged_indices=Argument("ragged_indices"))
    (received,) = ops.sparse_prefill.calls
    assert (received["indices"], received["indptr"]) == (dense, None)


def test_prefill_without_any_indices_is_an_error(sparse, ops):
    with pytest.raises(ValueError, match="needs indices"):
        call(getattr(sparse(), PREFILL), indices=None)
    assert ops.sparse_prefill.calls == []


PREFILL_TO_STOCK = {
    "another head": {"head_dim": 576, "nope_head_dim": 512, "q": Argument("q", shape=(6, 16, 576))},
    "another split of the head": {"nope_head_dim": 512 - 128, "rope_head_dim": 128},
    "more heads": {
        "q": Argument("q", shape=(6, 256, 512)),
        "output": Argument("output", shape=(6, 256, 512)),
    },
    "fp16 queries": {"q": Argument("q", dtype="float16")},
    "fp16 rows": {"kv": Argument("kv", dtype="float16")},
    "fp32 output": {"output": Argument("output", dtype="float32")},
    "a narrower output": {"output": Argument("output", shape=(6, 64, 448))},
    "wider rows": {"kv": Argument("kv", shape=(900, 1, 576))},
    "rows without their middle dim": {"kv": Argument("kv", shape=(900, 512))},
}


@pytest.mark.parametrize("changed", PREFILL_TO_STOCK.values(), ids=PREFILL_TO_STOCK)
def test_prefills_that_stock_gets(sparse, ops, changed):
    module = sparse()
    ragged = {"ragged_indices": Argument("ragged_indices"), "ragged_indptr": None}
    tag, received = call(getattr(module, PREFILL), **changed, **ragged)
    assert tag == "stock"
    assert {name: received[name] for name in (*changed, *ragged)} == {**changed, **ragged}
    assert ops.sparse_prefill.calls == []


def test_decode_of_0_30_rotates_nothing_and_returns_nothing(sparse, ops):
    assert call(getattr(sparse(DECODE_030), DECODE), swa_only=False) is None
    (received,) = ops.sparse_decode.calls
    assert (received["positions"], received["cos_sin_cache"]) == (None, None)


def test_decode_rotates_once_and_says_how_many_rows(sparse, ops):
    rotation = {name: Argument(name) for name in ("inv_rope_positions", "inv_rope_cos_sin_cache")}
    assert call(getattr(sparse(), DECODE), swa_only=False, **rotation) == 6
    (received,) = ops.sparse_decode.calls
    assert received["positions"] is rotation["inv_rope_positions"]
    assert received["cos_sin_cache"] is rotation["inv_rope_cos_sin_cache"]


def test_decode_without_positions_leaves_the_rotation_to_the_caller(sparse, ops):
    assert call(getattr(sparse(), DECODE), swa_only=False) == 0
    assert ops.sparse_decode.calls[0]["positions"] is None


@pytest.mark.parametrize(
    "table",
    [
        Argument("table", shape=(4096, 64), dtype="bfloat16"),
        Argument("table", shape=(4096, 128), dtype="float32"),
        None,
    ],
    ids=["bf16", "wider", "none"],
)
def test_a_table_that_ours_does_not_read_is_left_to_the_caller(sparse, ops, table):
    positions = Argument("inv_rope_positions")
    function = getattr(sparse(), DECODE)
    assert call(function, swa_only=True, inv_rope_positions=positions, inv_rope_cos_sin_cache=table) == 0
    (received,) = ops.sparse_decode.calls
    assert (received["positions"], received["cos_sin_cache"]) == (None, None)


def test_mxfp8_output_is_refused(sparse, ops):
    with pytest.raises(ValueError, match="gfx950"):
        call(getattr(sparse(), DECODE), swa_only=True, output_mxfp8=(1, 2))
    assert ops.sparse_decode.calls == []


def test_amds_hints_change_nothing(sparse, ops):
    call(getattr(sparse(), DECODE), swa_only=True, extra_cache_nan_free=True, adaptive_splits=True)
    assert set(ops.sparse_decode.calls[0]) == {
        "q", "out", "swa_cache", "swa_indices", "swa_indptr", "scale", "sink", "extra_cache", "extra_indices",
        "extra_indptr", "positions", "cos_sin_cache",
    }  # fmt: skip


DECODE_TO_STOCK = {
    "another head": {"head_dim": 576, "q": Argument("q", shape=(6, 16, 576))},
    "fp16": {"q": Argument("q", dtype="float16"), "output": Argument("output", dtype="float16")},
    "fp32 output": {"output": Argument("output", dtype="float32")},
    "more heads": {
        "q": Argument("q", shape=(6, 256, 512)),
        "output": Argument("output", shape=(6, 256, 512)),
    },
}


@pytest.mark.parametrize("changed", DECODE_TO_STOCK.values(), ids=DECODE_TO_STOCK)
def test_decodes_that_stock_gets_are_not_counted_as_rotated(payload, vllm, sparse, ops, changed):
    """Stock returns their number and rotates none of them: the caller must."""
    module = sparse()
    seen = []
    scope = {"seen": seen, "__name__": SPARSE}
    exec(f"def {DECODE}({DECODE_031}):\n    seen.append(dict(locals()))\n    return 6\n", scope)
    setattr(module, DECODE, scope[DECODE])
    payload.bind(SPARSE)
    rotation = {name: Argument(name) for name in ("inv_rope_positions", "inv_rope_cos_sin_cache")}
    assert call(getattr(module, DECODE), swa_only=False, **changed, **rotation) == 0
    (received,) = seen
    assert {name: received[name] for name in changed} == changed
    assert (received["inv_rope_positions"], received["output_mxfp8"]) == (None, None)
    assert ops.sparse_decode.calls == []


def test_decode_of_0_30_that_stock_gets(sparse, ops):
    tag, received = call(
        getattr(sparse(DECODE_030), DECODE), swa_only=False, **DECODE_TO_STOCK["another head"]
    )
    assert (tag, received["head_dim"], ops.sparse_decode.calls) == ("stock", 576, [])


@pytest.mark.parametrize("skip", [(), ("ragged",)])
@pytest.mark.parametrize("decode", [DECODE_030, DECODE_031], ids=["0.30", "0.31"])
def test_dense_decode_rows_are_packed_by_whatever_the_module_holds(sparse, ops, decode, skip):
    """A release's callers always pass ragged lists; with the op `ragged` left to stock, stock packs."""
    module = sparse(decode, skip=skip)
    given = {"swa_ragged_indices": None, "topk_ragged_indptr": None}
    if skip:
        # stock's stand-in returns what it was called with, a pair like the lists
        call(getattr(module, DECODE), swa_only=False, **given)
        (received,) = ops.sparse_decode.calls
        assert received["swa_indices"] == received["extra_indices"] == "stock"
        assert [received[f"{name}_indptr"]["num_rows"] for name in ("swa", "extra")] == [128, 128]
        assert received["swa_indptr"]["lengths"].name == "swa_lens"
        return
    ops.ragged.result = ("flat", "indptr")
    call(getattr(module, DECODE), swa_only=False, **given)
    first, second = ops.ragged.calls
    assert (first["indices"].name, first["lengths"].name, first["num_rows"]) == (
        "swa_indices",
        "swa_lens",
        128,
    )
    assert (second["indices"].name, second["lengths"].name) == ("topk_indices", "topk_lens")
    assert first["compact"] is True
    (received,) = ops.sparse_decode.calls
    assert (received["swa_indices"], received["extra_indptr"]) == ("flat", "indptr")


def test_decode_lists_that_are_missing_are_an_error(sparse, ops):
    function = getattr(sparse(), DECODE)
    with pytest.raises(ValueError, match="dense or ragged"):
        call(function, swa_only=False, topk_indices=None, topk_ragged_indices=None)
    with pytest.raises(ValueError, match="kv_cache"):
        call(function, swa_only=False, kv_cache=None)
    assert ops.sparse_decode.calls == []


def test_no_sink(sparse, ops):
    module = sparse()
    call(getattr(module, PREFILL), attn_sink=None)
    call(getattr(module, DECODE), swa_only=True, attn_sink=None)
    assert (ops.sparse_prefill.calls[0]["sink"], ops.sparse_decode.calls[0]["sink"]) == (None, None)


@pytest.mark.parametrize(
    "shape", [(6, 4, 4096), (6, 4, 7168), (6, 2, 5120), (3, 2, 4, 5120)], ids=lambda shape: str(shape)
)
def test_other_streams_go_to_stock(mhc, ops, shape):
    mhc.bind(MHC)
    residual = Argument("residual", shape=shape)
    for symbol in (PRE, FUSED, POST):
        tag, received = call(getattr(mhc.functions, symbol), residual=residual)
        assert (tag, received["residual"]) == ("stock", residual)
    assert ops.first == []
    assert not any(
        getattr(ops, op).calls for op in ("mhc_pre_delayed", "mhc_fused_post_pre_delayed", "mhc_post")
    )


def test_each_mhc_call_sees_to_it_that_the_kernels_are_compiled(mhc, ops):
    mhc.bind(MHC)
    for symbol in (PRE, FUSED, POST):
        assert call(getattr(mhc.functions, symbol)) == "result"
    assert ops.first == [5120] * 3


def test_each_call_of_another_op_does_too(sparse, ops):
    module = sparse()
    for symbol in (BUILD, PREFILL):
        call(getattr(module, symbol))
    call(getattr(module, DECODE), swa_only=True)
    call(getattr(sparse(DECODE_030), DECODE), swa_only=True)
    assert ops.first == ["ragged", "sparse_prefill", "sparse_decode", "sparse_decode"]


class Key:
    def __init__(self, hidden_size: int = 5120, hc_mult: int = 4, **more: Any) -> None:
        self.hidden_size, self.hc_mult = hidden_size, hc_mult
        self.save_pre_mix = True
        vars(self).update(more)


OTHERS = [Key(4096), Key(hc_mult=2), Key(split_mode="stats"), Key(save_pre_mix=False)]


def test_vllms_warm_up_compiles_ours_and_leaves_the_rest_to_stock(mhc, ops):
    mhc.bind(MHC)
    mhc.bind(WARMUP)
    keys = iter([Key(), OTHERS[0], Key(split_mode="fused"), *OTHERS[1:]])
    assert mhc.warmup.MHCPreNormKernel().compile_many(keys) == OTHERS
    assert ops.warmed == [5120, None]
    assert mhc.warmup.MHCPreNormKernel().compile_many([]) == []


@pytest.mark.parametrize("off", ["mhc_fused_post_pre_delayed", "mhc_post,mhc_fused_post_pre_delayed"])
def test_with_one_of_its_users_left_to_stock_stock_compiles_all(mhc, ops, monkeypatch, off):
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", off)
    mhc.bind(MHC)
    mhc.bind(WARMUP)
    keys = [Key(), *OTHERS]
    assert mhc.warmup.MHCPreNormKernel().compile_many(keys) == keys
    assert ops.warmed == [5120, None]


ALL_MHC = "mhc_pre_delayed,mhc_fused_post_pre_delayed,mhc_post"
REST = ",".join(op for op in bindings.OPS if not op.startswith("mhc_"))


def test_without_mhc_the_other_ops_are_warmed_up_all_the_same(mhc, ops, payload, monkeypatch):
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", ALL_MHC)
    mhc.bind(WARMUP)
    keys = [Key(), *OTHERS]
    assert mhc.warmup.MHCPreNormKernel().compile_many(keys) == keys
    assert None in ops.warmed
    # what is not ours is not said to be
    assert payload.bound_ops() == set() and payload.report()["bound"] == []


def test_without_any_op_the_warm_up_is_stocks(mhc, ops, monkeypatch):
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", f"{ALL_MHC},{REST}")
    stock = mhc.warmup.MHCPreNormKernel.compile_many
    mhc.bind(WARMUP)
    assert mhc.warmup.MHCPreNormKernel.compile_many is stock


def test_a_warm_up_that_does_not_fit_is_stocks_with_its_op_off(payload, vllm, monkeypatch):
    module = vllm.module(WARMUP, WARMUP_SOURCE.replace("compile_keys", "keys"))
    stock = module.MHCPreNormKernel.compile_many
    with pytest.raises(payload.BindError, match="unknown signature"):
        payload.bind(WARMUP)
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", "mhc_pre_delayed")
    payload.bind(WARMUP)
    assert module.MHCPreNormKernel.compile_many is stock


def test_no_module_starts_cuda_when_it_is_bound(payload, vllm, monkeypatch):
    """vLLM forks workers; a process that has started CUDA cannot."""

    def refuse(*_args: Any) -> None:
        raise AssertionError("CUDA was started")

    cuda = SimpleNamespace(is_initialized=lambda: False, current_device=refuse, get_device_properties=refuse)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    for name, source in (
        (SPARSE, sparse_source(DECODE_031)),
        (MHC, stub(PRE, PRE_ARGS) + stub(FUSED, FUSED_ARGS) + stub(POST, POST_ARGS)),
        (WARMUP, WARMUP_SOURCE),
    ):
        vllm.module(name, source)
        payload.bind(name)
    assert payload.bound_ops() == {
        "ragged", "sparse_prefill", "sparse_decode", "mhc_pre_delayed", "mhc_fused_post_pre_delayed", "mhc_post",
    }  # fmt: skip
    assert "warm" not in vars(payload)
