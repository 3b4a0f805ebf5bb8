"""The indexer's logits as `sparse_attn_indexer` of the four real releases calls them: its own call expressions, real tensors.

The kernels' launches are replaced by the oracle; everything before them is the product's.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fakes import RELEASES

from .conftest import definition, parsed, real_stub

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
DEEP_GEMM = "vllm.utils.deep_gemm"
PREFILL, DECODE = "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"
IMPORT = f"from {DEEP_GEMM} import {PREFILL}, {DECODE}, has_deep_gemm"
NEWEST = "0.33.0"
pytestmark = [pytest.mark.release, pytest.mark.kernels]
# two requests: (query tokens, states), packed one after the other
REQUESTS = ((5, 12), (3, 40))
LENS = (75, 130, 1)
WIDTH = 300


@dataclass
class Bound:
    """The module of one release with the overlay's logits, and what they were launched with."""

    module: ModuleType
    tree: Path
    version: str
    launched: list[tuple[Any, ...]]
    real_launch: Callable[..., None]

    def call(self, symbol: str, **names: Any) -> Any:
        """The one call expression of the release, with `names` for what it mentions."""
        function = definition(
            self.tree / "model_executor/layers/sparse_attn_indexer.py", "sparse_attn_indexer"
        )
        (found,) = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == symbol
        ]
        expression = compile(ast.Expression(found), symbol, "eval")
        return eval(expression, {symbol: vars(self.module)[symbol], **names})


@pytest.fixture(params=RELEASES)
def bound(request, payload, vllm, release_tree, monkeypatch) -> Bound:
    tree, launched = release_tree(request.param), []
    file = tree / "utils/deep_gemm.py"
    source = f"{real_stub(file, PREFILL)}\n{real_stub(file, DECODE)}\ndef has_deep_gemm(): return False\n"
    vllm.module("vllm.utils", "").__path__ = []
    vllm.module(DEEP_GEMM, source)
    module = vllm.module(INDEXER, IMPORT)
    payload.bind(INDEXER)
    monkeypatch.setattr(importlib.import_module(f"{payload.__name__}.warm"), "first_call", lambda op: None)
    real = importlib.import_module(f"{payload.__name__}.ops.indexer_decode.triton").launch
    _replace_launches(payload.__name__, monkeypatch, launched)
    return Bound(module, tree, request.param, launched, real)


def _replace_launches(name: str, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[Any, ...]]) -> None:
    for op in ("indexer_prefill", "indexer_decode"):
        reference = importlib.import_module(f"{name}.ops.{op}.reference")
        function = getattr(reference, op)

        def launch(q: Any, keys: Any, *args: Any, function: Callable[..., Any] = function) -> None:
            launched.append((q, keys, *args))
            more = {"compressed": args[-1]} if isinstance(args[-1], bool) else {}
            args = args[:-1] if more else args
            function(q.view(torch.uint8), keys.view(torch.uint8), *args, **more)

        monkeypatch.setattr(importlib.import_module(f"{name}.ops.{op}.triton"), "launch", launch)


def codes(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.randn(shape, generator=generator) * 50).to(torch.float8_e4m3fn)


def floats(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def prefill_names(**changed: Any) -> dict[str, Any]:
    """What the expressions of all releases mention, as the function has it: the chunk is part of a larger batch."""
    tokens = sum(one for one, _states in REQUESTS)
    states = sum(one for _tokens, one in REQUESTS)
    ks, ke, before = [], [], 0
    for count, length in REQUESTS:
        ks += [before] * count
        ke += [before + length - count + token + 1 for token in range(count)]
        before += length
    q, weights = codes(tokens + 4, 32, 128), floats(tokens + 4, 32)
    workspace = floats(states, 1).abs().view(torch.uint8)
    return {
        "q_slice_cast": q[2 : 2 + tokens],
        "q_scale_slice": None,
        "k_quant_cast": codes(states + 9, 128)[:states],
        "k_scale_cast": workspace.view(torch.float32).squeeze(-1),
        "weights": weights,
        "chunk_weights": weights[2 : 2 + tokens],
        "row_start": 2,
        "row_end": 2 + tokens,
        "cu_seqlen_ks": torch.tensor(ks, dtype=torch.int32),
        "cu_seqlen_ke": torch.tensor(ke, dtype=torch.int32),
        "chunk": SimpleNamespace(
            token_start=2, token_end=2 + tokens, max_seqlen_k=max(one for _tokens, one in REQUESTS)
        ),
        **changed,
    }


def stock_torch(tree: Path, name: str) -> Callable[..., Any]:
    """The release's PyTorch function of that name, without importing its module."""
    node = definition(tree / "v1/attention/ops/rocm_aiter_mla_sparse.py", name)
    platform = SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn, is_fp8_fnuz=lambda: False)
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "current_platform": platform}
    scope["FP8_DTYPE"] = torch.float8_e4m3fn
    exec(compile(ast.Module([node], []), name, "exec"), scope)
    return scope[name]


def test_prefill_is_stocks_function_at_the_columns_that_its_caller_reads(bound):
    names = prefill_names()
    logits = bound.call(PREFILL, **names)
    ks, ke = names["cu_seqlen_ks"], names["cu_seqlen_ke"]
    stock = stock_torch(bound.tree, "fp8_mqa_logits_torch")(
        names["q_slice_cast"], (names["k_quant_cast"], names["k_scale_cast"]), names["chunk_weights"], ks, ke
    )
    compressed = bound.version == NEWEST
    states = sum(one for _tokens, one in REQUESTS)
    assert tuple(logits.shape) == (8, names["chunk"].max_seqlen_k if compressed else states)
    assert logits.dtype == torch.float32
    for row in range(8):
        first = 0 if compressed else int(ks[row])
        got = logits[row, first : first + int(ke[row] - ks[row])]
        want = stock[row, ks[row] : ke[row]]
        # stock rounds every dot to bf16
        assert float((got - want).norm()) <= 5e-3 * float(want.norm())


def test_prefill_takes_the_callers_memory_as_it_is(bound):
    names = prefill_names()
    logits = bound.call(PREFILL, **names)
    ((q, k, k_scale, weights, ks, ke, out, _compressed),) = bound.launched
    for ours, theirs in (
        (q, "q_slice_cast"),
        (k, "k_quant_cast"),
        (k_scale, "k_scale_cast"),
        (weights, "chunk_weights"),
    ):
        assert ours.data_ptr() == names[theirs].data_ptr()
    assert ks is names["cu_seqlen_ks"] and ke is names["cu_seqlen_ke"] and out is logits
    # top-k reads rows 16 bytes at a time
    assert logits.stride() == (256, 1) and logits.data_ptr() % 16 == 0


def test_prefill_cleans_when_asked(bound):
    if bound.version == NEWEST:
        return
    names = prefill_names()
    arguments = [names["q_slice_cast"], None], [names["k_quant_cast"], names["k_scale_cast"]]
    ks, ke = names["cu_seqlen_ks"], names["cu_seqlen_ke"]
    logits = vars(bound.module)[PREFILL](*arguments, names["chunk_weights"], ks, ke, clean_logits=True)
    column = torch.arange(logits.shape[1])
    inside = (column >= ks[:, None]) & (column < ke[:, None])
    assert bool(logits[inside].isfinite().all()) and bool((logits[~inside] == float("-inf")).all())


def paged_cache(block: int, pages: int, gap: int) -> Any:
    """Pages of codes, then scales, with other layers' pages between them."""
    stride = block * 132 + gap
    memory = torch.full((pages * stride,), 0xFF, dtype=torch.uint8)
    cache = torch.as_strided(memory, (pages, block, 132), (stride, 132, 1))
    flat = torch.as_strided(memory, (pages, block * 132), (stride, 1))
    flat[:, : block * 128] = codes(pages, block * 128).view(torch.uint8)
    flat[:, block * 128 :] = floats(pages, block).abs().view(torch.uint8)
    return cache


def decode_names(next_n: int = 1, block: int = 64, gap: int = 0, **changed: Any) -> dict[str, Any]:
    requests = len(LENS)
    lens = torch.tensor(
        [[one - next_n + 1 + n for n in range(next_n)] for one in LENS], dtype=torch.int32
    ).clamp(min=0)
    pages = -(-max(LENS) // block)
    table = (
        torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1))
        .int()
        .view(requests, pages)
    )
    wide = torch.zeros((requests, pages + 7), dtype=torch.int32)
    wide[:, :pages] = table
    return {
        "padded_q_quant_cast": codes(requests * next_n + 2, 32, 128)[: requests * next_n].reshape(
            requests, -1, 32, 128
        ),
        "padded_q_scale": None,
        "kv_cache": paged_cache(block, requests * pages, gap).unsqueeze(-2),
        "weights": floats(requests * next_n + 2, 32),
        "decode_weights": floats(requests * next_n + 2, 32)[: requests * next_n],
        "num_padded_tokens": requests * next_n,
        "seq_lens": lens,
        "max_model_len": WIDTH,
        # the schedule is the builder's buffer, unfilled
        "decode_metadata": SimpleNamespace(
            block_table=wide, schedule_metadata=torch.zeros((9, 2)), indices=None
        ),
        **changed,
    }


@pytest.mark.parametrize(("block", "gap"), [(64, 0), (128, 0)])
def test_decode_is_stocks_function_up_to_the_lengths(bound, vllm, block, gap):
    names = decode_names(block=block, gap=gap)
    names["decode_weights"] = names["weights"][: len(LENS)]
    logits = bound.call(DECODE, **names)
    assert tuple(logits.shape) == (len(LENS), WIDTH) and logits.stride() == (512, 1)
    vllm.module("vllm.utils.math_utils", "def cdiv(a, b): return -(-a // b)")
    stock = stock_torch(bound.tree, "fp8_paged_mqa_logits_torch")(
        names["padded_q_quant_cast"], names["kv_cache"], names["weights"][: len(LENS)], names["seq_lens"],
        names["decode_metadata"].block_table, WIDTH,
    )  # fmt: skip
    for row, length in enumerate(LENS):
        torch.testing.assert_close(logits[row, :length], stock[row, :length], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("next_n", [1, 2])
def test_decode_takes_the_callers_memory_as_it_is(bound, next_n):
    names = decode_names(next_n, block=128, gap=64)
    logits = bound.call(DECODE, **names)
    ((q, cache, weights, lens, table, out),) = bound.launched
    assert q.data_ptr() == names["padded_q_quant_cast"].data_ptr()
    assert cache.data_ptr() == names["kv_cache"].data_ptr() and cache.stride(0) == (128 * 132 + 64) // 4
    expected = names["decode_weights"] if bound.version == NEWEST else names["weights"]
    assert weights.data_ptr() == expected.data_ptr()
    assert lens is names["seq_lens"] and table is names["decode_metadata"].block_table and out is logits
    assert logits.shape[0] == len(LENS) * next_n


def test_what_is_not_served_is_refused(bound):
    with pytest.raises(ValueError, match="MXFP4 indexer cache"):
        bound.call(PREFILL, **prefill_names(q_scale_slice=floats(8, 32)))
    with pytest.raises(ValueError, match="MXFP4 indexer cache"):
        bound.call(DECODE, **decode_names(padded_q_scale=floats(3, 1, 32)))
    names = decode_names()
    names["decode_metadata"].indices = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="indices: rows of varying length"):
        bound.call(DECODE, **names)
    with pytest.raises(ValueError, match="32 heads of 128 codes"):
        bound.call(PREFILL, **prefill_names(q_slice_cast=codes(8, 64, 128)))
    assert bound.launched == []


def test_the_caller_asks_for_nothing_else(bound):
    """DeepGEMM's other functions would be called where neither op is."""
    file = bound.tree / "model_executor/layers/sparse_attn_indexer.py"
    imported = {
        alias.name
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ImportFrom) and node.module == DEEP_GEMM
        for alias in node.names
    }
    adapted = {"mqa_logits_mx_inputs", "mqa_logits_use_mx_scales"} if bound.version == NEWEST else set()
    assert imported == {PREFILL, DECODE, "has_deep_gemm"} | adapted


def test_only_the_importer_is_changed(bound):
    stock = sys.modules[DEEP_GEMM]
    for symbol in (PREFILL, DECODE):
        ours = vars(bound.module)[symbol]
        assert ours is not vars(stock)[symbol] and ours.__deepinfer__["stock"] is vars(stock)[symbol]


# what neither copies nor waits; `empty` comes from the pool of a CUDA graph
HARMLESS = {"aten::empty", "aten::slice", "aten::select", "aten::view", "aten::alias", "aten::detach"}


def test_decode_in_a_cuda_graph_neither_copies_nor_waits(bound, payload, monkeypatch):
    from .test_real_calls import Launches, Recorded

    kernel = importlib.import_module(f"{payload.__name__}.ops.indexer_decode.triton")
    monkeypatch.setattr(kernel, "launch", bound.real_launch)
    monkeypatch.setattr(kernel, "_indexer_decode_kernel", Launches())
    names = decode_names()
    names["weights"] = names["decode_weights"]
    with Recorded() as seen:
        bound.call(DECODE, **names)
    assert seen.names <= HARMLESS
