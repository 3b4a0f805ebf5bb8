"""What vLLM's callers pass, as real tensors: every argument of the adapters reaches the ops in a form that they take.

The launches are replaced, the ops' own checks are not. Shapes are those of the callers in `amd/rocm.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import BUILD, DECODE, PREFILL, SPARSE
from .test_adapters import DECODE_030, DECODE_031, HEAD, sparse_source

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = pytest.mark.kernels
TOKENS, HEADS = 3, 8


@pytest.fixture
def sparse(payload, vllm, monkeypatch) -> Callable[..., Any]:
    """Binds the module; `launched` keeps what the ops would launch."""
    made = SimpleNamespace(launched=[])
    decode = importlib.import_module(f"{payload.__name__}.ops.sparse_decode.triton")
    prefill = importlib.import_module(f"{payload.__name__}.ops.sparse_prefill.triton")
    monkeypatch.setattr(decode, "launch", lambda *args: made.launched.append(args))
    warm = importlib.import_module(f"{payload.__name__}.warm")
    monkeypatch.setattr(warm, "up", lambda hidden=None: None)
    monkeypatch.setattr(prefill, "launch", lambda *args, **more: made.launched.append((*args, more)))

    def bind(source: str = DECODE_031) -> Any:
        made.module = vllm.module(SPARSE, sparse_source(source))
        payload.bind(SPARSE)
        return made

    return bind


def cache(blocks: int = 4, size: int = 64) -> Any:
    """Pages with room after them, as in vLLM's KV cache of several layers."""
    return torch.zeros((blocks, size * 584 + 256), dtype=torch.uint8)[:, : size * 584].view(blocks, size, 584)


def decode_args(**changed: Any) -> dict[str, Any]:
    return {
        "q": torch.zeros((TOKENS, HEADS, 512), dtype=torch.bfloat16),
        "kv_cache": cache(),
        "swa_k_cache": cache(size=128),
        "swa_only": False,
        "topk_indices": None,
        "topk_lens": None,
        "swa_indices": torch.zeros((TOKENS, 1, 128), dtype=torch.int32),
        "swa_lens": torch.ones(TOKENS, dtype=torch.int32),
        "swa_ragged_indices": torch.zeros(TOKENS * 128, dtype=torch.int32),
        "swa_ragged_indptr": torch.zeros(TOKENS + 1, dtype=torch.int32),
        "topk_ragged_indices": torch.zeros(TOKENS * 512, dtype=torch.int32),
        "topk_ragged_indptr": torch.zeros(TOKENS + 1, dtype=torch.int32),
        "attn_sink": torch.zeros(HEADS),
        "scale": 0.04,
        **HEAD,
        "output": torch.zeros((TOKENS, HEADS, 512), dtype=torch.bfloat16),
        "inv_rope_positions": torch.arange(TOKENS),
        "inv_rope_cos_sin_cache": torch.zeros((99, 64)),
        **changed,
    }


def prefill_args(**changed: Any) -> dict[str, Any]:
    return {
        "q": rows(TOKENS, HEADS, 512),
        "kv": rows(4, 100, 512).view(-1, 1, 512),
        "indices": torch.zeros((TOKENS, 640), dtype=torch.int32),
        "topk_length": torch.ones(TOKENS, dtype=torch.int32),
        "scale": 0.04,
        **HEAD,
        "attn_sink": torch.zeros(HEADS),
        "output": rows(TOKENS, HEADS, 512),
        **changed,
    }


def rows(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.bfloat16)


DECODES: dict[str, tuple[dict[str, Any], int]] = {
    "usual": ({}, TOKENS),
    "one layer in two has no compressed cache": (
        {"swa_only": True, "kv_cache": None, "topk_ragged_indices": None, "topk_ragged_indptr": None},
        TOKENS,
    ),
    "DSpark's drafter, wider windows and no causal order": (
        {"swa_only": True, "swa_ragged_indices": torch.zeros(TOKENS * 133, dtype=torch.int32)},
        TOKENS,
    ),
    "output is a part of a larger one": ({"output": rows(9, 16, 640)[2:5, 4:12, :512]}, TOKENS),
    "q is a part of a larger one": ({"q": rows(9, 16, 640)[2:5, 4:12, :512]}, TOKENS),
    "padded heads": (
        {"q": rows(TOKENS, 64, 512), "output": rows(TOKENS, 64, 512), "attn_sink": torch.zeros(64)},
        TOKENS,
    ),
    "sink of all padded heads": ({"attn_sink": torch.zeros(64)}, TOKENS),
    "sink in bf16, every second": ({"attn_sink": rows(16)[::2]}, TOKENS),
    "int32 positions": ({"inv_rope_positions": torch.arange(TOKENS, dtype=torch.int32)}, TOKENS),
    "positions of a longer batch, apart": ({"inv_rope_positions": torch.arange(20)[::2]}, TOKENS),
    "table in bf16": ({"inv_rope_cos_sin_cache": rows(99, 64)}, 0),
    "table with room after each row": ({"inv_rope_cos_sin_cache": torch.zeros((99, 80))[:, :64]}, TOKENS),
    "no positions": ({"inv_rope_positions": None}, 0),
    "buffers longer than the lists": (
        {
            "swa_ragged_indices": torch.zeros(4096, dtype=torch.int32),
            "swa_ragged_indptr": torch.zeros(99, dtype=torch.int32),
        },
        TOKENS,
    ),
    "no list entries at all": ({"topk_ragged_indices": torch.zeros(0, dtype=torch.int32)}, TOKENS),
    "int64 lists": (
        {
            "topk_ragged_indices": torch.zeros(9, dtype=torch.int64),
            "topk_ragged_indptr": torch.zeros(TOKENS + 1, dtype=torch.int64),
        },
        TOKENS,
    ),
}


@pytest.mark.parametrize(("changed", "rotated"), DECODES.values(), ids=DECODES)
def test_decode(sparse, changed, rotated):
    made = sparse()
    arguments = decode_args(**changed)
    assert getattr(made.module, DECODE)(**arguments) == rotated
    ((q, out, lists, scale, sink, positions, table),) = made.launched
    # the caller's own memory, whatever its strides
    assert q.data_ptr() == arguments["q"].data_ptr() and q.stride() == arguments["q"].stride()
    assert out.data_ptr() == arguments["output"].data_ptr() and out.stride() == arguments["output"].stride()
    assert (len(lists), scale) == (1 if arguments["swa_only"] else 2, 0.04)
    assert sink.dtype == torch.float32 and sink.is_contiguous() and len(sink) >= q.shape[1]
    assert (positions is not None) == (table is not None) == bool(rotated)
    if rotated:
        assert positions.tolist()[:TOKENS] == arguments["inv_rope_positions"].tolist()[:TOKENS]


def test_decode_of_0_30(sparse):
    made = sparse(DECODE_030)
    arguments = decode_args()
    for name in ("inv_rope_positions", "inv_rope_cos_sin_cache"):
        del arguments[name]
    assert getattr(made.module, DECODE)(**arguments) is None
    assert made.launched[0][-2:] == (None, None)


def test_a_usual_decode_makes_no_tensor(sparse, monkeypatch):
    """In a CUDA graph it would be a copy at every step: what vLLM passes must reach the launch as it is."""
    made = sparse()
    arguments = decode_args()
    getattr(made.module, DECODE)(**arguments)
    ((_q, _out, ((_, indices, indptr), (_, *extra)), _scale, sink, positions, table),) = made.launched
    assert indices is arguments["swa_ragged_indices"] and indptr is arguments["swa_ragged_indptr"]
    assert extra == [arguments["topk_ragged_indices"], arguments["topk_ragged_indptr"]]
    assert sink is arguments["attn_sink"] and table is arguments["inv_rope_cos_sin_cache"]
    assert positions is arguments["inv_rope_positions"]


# what neither copies nor waits; `empty` comes from the pool of a CUDA graph
HARMLESS = {"aten::empty", "aten::slice", "aten::new_empty", "aten::view", "aten::_unsafe_view", "aten::squeeze", "aten::as_strided",
            "aten::_reshape_alias", "aten::alias", "aten::detach"}  # fmt: skip


class Recorded(TorchDispatchMode):
    """The names of the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.name().partition(".")[0])
        return function(*args, **(kwargs or {}))


def test_calls_in_a_cuda_graph_neither_copy_nor_wait(sparse, payload, monkeypatch):
    made = sparse()
    kernel = importlib.import_module(f"{payload.__name__}.ops.ragged.triton")
    monkeypatch.setattr(kernel, "_ragged_kernel", Launches())
    indices, lengths = torch.zeros((96, 1, 128), dtype=torch.int32), torch.ones(96, dtype=torch.int32)
    decode, prefill = decode_args(), prefill_args()
    with Recorded() as seen:
        getattr(made.module, BUILD)(indices, lengths)
        getattr(made.module, BUILD)(indices[:2], lengths[:2], num_rows=900)
        getattr(made.module, DECODE)(**decode)
        getattr(made.module, PREFILL)(**prefill)
    assert seen.names <= HARMLESS
    assert len(made.launched) == 2


class Launches:
    """A kernel that takes every launch and does nothing."""

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return lambda *_args, **_options: None


@pytest.mark.parametrize("swa_only", [False, True])
def test_a_batch_without_decodes(sparse, swa_only):
    made = sparse()
    empty = decode_args(
        q=rows(0, HEADS, 512),
        output=rows(0, HEADS, 512),
        swa_only=swa_only,
        inv_rope_positions=torch.arange(0),
    )
    assert getattr(made.module, DECODE)(**empty) == 0
    assert made.launched == []


PREFILLS: dict[str, dict[str, Any]] = {
    "usual": {},
    "wider rows than are used": {"indices": torch.zeros((TOKENS, 700), dtype=torch.int32)[:, :640]},
    "three dims": {"indices": torch.zeros((TOKENS, 1, 640), dtype=torch.int32)},
    "lengths apart": {"topk_length": torch.ones(2 * TOKENS, dtype=torch.int32)[::2]},
    "int64": {"indices": torch.zeros((TOKENS, 640), dtype=torch.int64), "topk_length": torch.ones(TOKENS, dtype=torch.int64)},
    "output is a part of a larger one": {"output": rows(9, 16, 640)[2:5, 4:12, :512]},
    "sink of all padded heads": {"attn_sink": torch.zeros(64)},
    "no lengths": {"topk_length": None},
    "ragged": {
        "ragged_indices": torch.zeros(900, dtype=torch.int32),
        "ragged_indptr": torch.zeros(TOKENS + 5, dtype=torch.int32),
    },
}  # fmt: skip


@pytest.mark.parametrize("changed", PREFILLS.values(), ids=PREFILLS)
def test_prefill(sparse, changed):
    made = sparse()
    arguments = prefill_args(**changed)
    assert getattr(made.module, PREFILL)(**arguments) is None
    ((q, kv, out, scale, sink, indices, starts, more),) = made.launched
    assert q is arguments["q"] and kv.data_ptr() == arguments["kv"].data_ptr() and kv.shape == (400, 512)
    assert out.data_ptr() == arguments["output"].data_ptr() and out.stride() == arguments["output"].stride()
    assert more == {"ragged": "ragged_indices" in changed} and scale == 0.04
    assert indices.dtype == starts.dtype == torch.int32 and starts.is_contiguous() and len(sink) >= HEADS
