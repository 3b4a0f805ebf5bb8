"""The Engram lookup's binding: the releases' own method and callers, and their kernel's results."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import RELEASES

from .conftest import definition, parsed, real_stub

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.release, pytest.mark.kernels]
ENGRAM = "vllm.models.deepseek_v41.common.engram"
FILE = "models/deepseek_v41/common/engram.py"
LOOKUP = "ParallelEngramEmbedding.lookup"
HEADS, ALL_HEADS, DIM, START, ROWS = 3, 8, 64, 40, 90


@pytest.fixture(params=RELEASES)
def release(request) -> str:
    return request.param


@pytest.fixture
def tree(release, release_tree) -> Path:
    return release_tree(release)


@pytest.fixture
def bound(payload, vllm, tree, monkeypatch) -> SimpleNamespace:
    """The release's class with the overlay's lookup; `launched` keeps what the op would launch."""
    made = SimpleNamespace(launched=[], warmed=[])
    module = vllm.module(ENGRAM, real_stub(tree / FILE, LOOKUP))
    kernel = importlib.import_module(f"{payload.__name__}.ops.engram.triton")
    warm = importlib.import_module(f"{payload.__name__}.warm")
    monkeypatch.setattr(kernel, "launch", lambda *args: made.launched.append(args))
    monkeypatch.setattr(warm, "first_call", made.warmed.append)
    before = str(inspect.signature(module.ParallelEngramEmbedding.lookup))
    payload.bind(ENGRAM)
    assert str(inspect.signature(module.ParallelEngramEmbedding.lookup)) == before
    made.table = module.ParallelEngramEmbedding()
    vars(made.table).update(
        part_n_hash_cols=HEADS, n_hash_cols=ALL_HEADS, head_start=2, vocab_start_idx=START,
        vocab_end_idx=START + ROWS, dim=DIM, block_size=32, peer_rows=0,
        _storage=lambda: (
            torch.zeros(ROWS, DIM, dtype=torch.uint8).view(torch.float8_e4m3fn),
            torch.zeros(ROWS, DIM // 32, dtype=torch.uint8),
        ),
    )  # fmt: skip
    return made


def ids_of(tokens: int = 5, layers: int = 2) -> Any:
    """One layer of what `NgramHashState` makes for all."""
    return torch.zeros((tokens, layers, ALL_HEADS), dtype=torch.int32)[:, 1]


def rows_of(tokens: int = 5, dtype: Any = torch.bfloat16) -> Any:
    return torch.zeros((16, HEADS, DIM), dtype=dtype)[:tokens]


@pytest.mark.parametrize("background", [False, True])
def test_staging(bound, background):
    ids, rows = ids_of(), rows_of()
    if background:
        assert bound.table.lookup(ids, rows, background=True) is None
    else:
        assert bound.table.lookup(ids, rows) is None
    ((out, given, weight, scales, peers, place, said),) = bound.launched
    assert out is rows and given.data_ptr() == ids.data_ptr() and given.stride() == ids.stride()
    assert (weight.dtype, scales.dtype, peers, said) == (torch.uint8, torch.uint8, None, background)
    assert place == (2, START, START + ROWS, 0)
    assert bound.warmed == ["engram"]


def test_a_class_of_a_release_without_peers(bound):
    del bound.table.peer_rows
    bound.table.lookup(ids_of(), rows_of())
    assert bound.launched[0][4] is None


def test_parts_of_other_ranks(bound):
    bound.table.peer_rows = 45
    bound.table.peer_ptrs = torch.tensor([1 << 40, 1 << 41])
    bound.table.lookup(ids_of(), rows_of())
    ((_, _, _, _, peers, place, _),) = bound.launched
    assert peers is bound.table.peer_ptrs and place[3] == 45


def test_no_tokens(bound):
    bound.table.lookup(ids_of(0), rows_of(0))
    assert bound.launched == []


def test_what_is_not_served_is_refused(bound):
    with pytest.raises(ValueError, match=r"packed Engram rows \(torch.uint8\)"):
        bound.table.lookup(ids_of(), rows_of(dtype=torch.uint8))
    bound.table.block_size = 64
    with pytest.raises(ValueError, match="64 elements"):
        bound.table.lookup(ids_of(), rows_of())
    assert bound.launched == []


def test_the_callers(tree, release):
    """Every lookup of a table in V4.1: two arguments, and `background` by its name if at all."""
    calls = [
        node
        for file in sorted((tree / "models/deepseek_v41").glob("*/engram.py"))
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "lookup"
    ]
    assert len(calls) == {"0.30.0": 4, "0.31.0": 4}.get(release, 5)
    for call in calls:
        assert len(call.args) == 2 and {one.arg for one in call.keywords} <= {"background"}
    # packed rows are only asked for where a linear takes MXFP8 activations
    if release in RELEASES[2:]:
        assert "can_fuse_query_quant" in ast.unparse(definition(tree / FILE, "EngramBatch.create"))
    hashes = next(
        one
        for one in ast.walk(parsed(tree / FILE))
        if isinstance(one, ast.ClassDef) and one.name == "NgramHashState"
    )
    assert "dtype=torch.int32" in ast.unparse(hashes)
