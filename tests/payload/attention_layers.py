"""V4.1's layers with the methods of real releases, on CPU tensors: what a test of the attention class needs of vLLM."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from deepinfer_sm80.ops.combine.reference import combine
from deepinfer_sm80.ops.sparse_prefill.reference import sparse_prefill

from .conftest import parsed

CLASS = "DeepseekV41ROCMAiterMLAAttention"
# fmt: off
METHODS = (
    "_forward_prefill", "_forward_decode", "forward_mqa", "_o_proj", "_decode_topk_ragged", "_prefill_workspace_shapes",
    "_wo_b_after_wo_a",
)
# fmt: on
WINDOW, TOPK, HEADS, DIM = 8, 4, 2, 16
MAX_LEN, MAX_TOKENS = 64, 48


class Context:
    """A forward context: what vLLM's dataclass has, and room for what a test or a layer hangs on it."""

    def __init__(self, metadata: dict[str, Any] | None) -> None:
        self.attn_metadata = metadata


class Workspace:
    """vLLM's workspace: one buffer that everyone asks for, with whatever the last one left in it."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.get = Workspace.stock
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def get_simultaneous(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return self.get(self, *wanted)

    def stock(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in wanted]
        self.asked.append(sum(sizes))
        if len(self.buffer) < sum(sizes):
            self.buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        made, start = [], 0
        for (shape, dtype), size in zip(wanted, sizes, strict=True):
            made.append(self.buffer[start : start + size].view(dtype).reshape(shape))
            start += size
        return made

    def clobber(self, count: int) -> None:
        """What experts and indexers do: ask for `count` bytes and write to all of them."""
        (scratch,) = self.get_simultaneous(((count,), torch.uint8))
        # 3.0 in bfloat16
        scratch.fill_(0x40)


class Builder:
    """A window group's metadata builder: with zeros of its own where the release has replay."""

    def __init__(self, replays: bool = True, requests: int = 6) -> None:
        if replays:
            self.no_replay_start = torch.zeros(requests, dtype=torch.int32)


class Backend:
    """The window caches' backend."""

    @staticmethod
    def get_builder_cls() -> type:
        return Builder


class Base:
    """What the portable class inherits: `DeepseekV4Attention`, as far as prefill and decode ask for it."""

    PREFILL_CHUNK_SIZE = 4
    swa_backend_cls = Backend

    def __init__(self, **attributes: Any) -> None:
        self.wo_a = SimpleNamespace(is_bmm=False)
        vars(self).update(attributes)

    def forward(self, positions: Any, hidden_states: Any, llama_4_scaling: Any = None) -> Any:
        return hidden_states

    def _compressed_kv_cache(self) -> Any:
        return self.cache

    def _wo_b_proj(self, z: Any) -> Any:
        return ("wo_b_proj", z)

    def wo_b(self, z: Any) -> Any:
        return ("wo_b", z)


def module(tree: Path, release: str) -> ModuleType:
    """A module with the class of a release, its methods as they are and everything they call recorded in `calls`."""
    made = ModuleType("vllm.models.deepseek_v41.amd.rocm")
    made.calls = []  # type: ignore[attr-defined]
    made.workspace = Workspace()  # type: ignore[attr-defined]
    vars(made).update(_names(made))
    file = tree / "models/deepseek_v41/amd/rocm.py"
    (node,) = [one for one in parsed(file).body if isinstance(one, ast.ClassDef) and one.name == CLASS]
    body = "\n\n".join(
        ast.unparse(one) for one in node.body if isinstance(one, ast.FunctionDef) and one.name in METHODS
    )
    source = f"from __future__ import annotations\n\nclass {CLASS}(Base):\n{_indented(body)}\n"
    exec(compile(source, str(file), "exec"), vars(made))
    gather = "out, cache, seq_lens, gather_lens, block_table, block_size, offset, use_fnuz=False"
    if release not in ("0.30.0", "0.31.0"):
        gather += ", max_gather_len=None"
    exec(
        f"def dequantize_and_gather_k_cache({gather}):\n    _gather(out, cache, seq_lens, gather_lens, offset)",
        vars(made),
    )
    made.Metadata = _metadata(tree)  # type: ignore[attr-defined]
    return made


def _indented(source: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in source.splitlines())


def _metadata(tree: Path) -> type:
    """The class of a step's window metadata, with the release's own chunk plan."""
    file = tree / "v1/attention/backends/mla/sparse_swa.py"
    (node,) = [
        one
        for one in parsed(file).body
        if isinstance(one, ast.ClassDef) and one.name == "DeepseekSparseSWAMetadata"
    ]
    fields = {
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    (plan,) = [
        one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "get_prefill_chunk_plan"
    ]
    names: dict[str, Any] = {"torch": torch, "cdiv": lambda a, b: -(-a // b), "cast": cast}
    exec(f"from __future__ import annotations\n\nclass Metadata(SimpleNamespace):\n{_indented(ast.unparse(plan))}\n",
         names | {"SimpleNamespace": SimpleNamespace}, names)  # fmt: skip
    names["Metadata"].has_replay_start = "replay_start" in fields
    names["Metadata"].get_prefill_chunk_plan.__globals__.update(names)
    return names["Metadata"]


def _names(made: ModuleType) -> dict[str, Any]:
    """Everything the methods call, recorded: by the oracles where the result matters."""
    calls, workspace = made.calls, made.workspace

    def gather(out: Any, cache: Any, seq_lens: Any, gather_lens: Any, offset: int) -> None:
        """A cache here is `[positions, 512]`, of one request's or all's rows alike."""
        calls.append(("gather", "swa" if gather_lens is not None else "compressed"))
        lens = seq_lens if gather_lens is None else gather_lens
        for request, (end, count) in enumerate(zip(seq_lens.tolist(), lens.tolist(), strict=True)):
            out[request, offset : offset + count] = cache[end - count : end]

    def combine_topk_swa_indices(*args: Any) -> Any:
        calls.append(("combine", args[6]))
        return combine(*args, replay_clamp=True, width_cap=False)

    def rocm_sparse_attn_prefill(
        q: Any, kv: Any, indices: Any, topk_length: Any, scale: float, head_dim: int, nope_head_dim: int,
        rope_head_dim: int, attn_sink: Any, output: Any, ragged_indices: Any = None, ragged_indptr: Any = None,
    ) -> None:  # fmt: skip
        calls.append(("attend", "ragged" if ragged_indptr is not None else "dense"))
        if ragged_indptr is None:
            # what stock does where it is given none
            ragged_indices, ragged_indptr = made.build_ragged_indices_from_dense(indices, topk_length)
        lists = {"indices": ragged_indices, "indptr": ragged_indptr}
        sparse_prefill(q, kv.squeeze(1), output, scale, attn_sink, **lists)

    def build_ragged_indices_from_dense(indices: Any, lengths: Any, num_rows: int = -1) -> Any:
        calls.append(("ragged", num_rows))
        flat = torch.cat([row[:length] for row, length in zip(indices, lengths.tolist(), strict=True)])
        return flat, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.long().cumsum(0)])

    def rotate(output: Any, positions: Any, *_args: Any) -> None:
        output += 1

    def project(_rope: Any, output: Any, *args: Any, inverse_rope: bool = True) -> Any:
        return output + 1 if inverse_rope else output

    types = ("QuantizedActivation", "DeepseekV4FlashMLAMetadata", "DeepseekV4ROCMAiterSparseSWAMetadata",
             "DeepseekV41ROCMAiterSparseSWAMetadata")  # fmt: skip
    return {name: type(name, (), {}) for name in types} | {
        "Any": Any,
        "Base": Base,
        "torch": torch,
        "cast": cast,
        "_ON_GFX950": False,
        "_gather": gather,
        "build_ragged_indices_from_dense": build_ragged_indices_from_dense,
        "combine_topk_swa_indices": combine_topk_swa_indices,
        "compute_global_topk_ragged_indices_and_indptr": lambda *_args: (None, None, None),
        "current_platform": SimpleNamespace(is_fp8_fnuz=lambda: False),
        "current_workspace_manager": lambda: workspace,
        "get_forward_context": lambda: made.context,
        "rocm_inv_rope_einsum": project,
        "rocm_inverse_rope_rows_": rotate,
        "rocm_sparse_attn_prefill": rocm_sparse_attn_prefill,
        "_trust_dsv4_extra_cache_nan_free": lambda *_args: False,
    }


def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as if an op of ours stood there."""
    function.__deepinfer__ = {}  # type: ignore[attr-defined]
    return function


class Model:
    """Layers of one class over the topology of V4.1, or a small one, run through prefills.

    Args:
        made: a release's module.
        layer_class: the class of the layers.
        ratios, kv_sources, index_sources: as in the model's configuration.
    """

    def __init__(
        self, made: ModuleType, layer_class: type, ratios: tuple[int, ...], kv_sources: tuple[int, ...],
        index_sources: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.made = made
        # bytes of the workspace that are written between two attentions
        self.scratch = 1024
        # and by an indexer before its layer's attention
        self.indexer = 1024
        # layer that owns a cache → its group's metadata
        self.compressed_metadata: dict[int, Any] = {}
        self.topk = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)
        self.layers = []
        caches: dict[int | None, Any] = {None: None}
        for source in kv_sources:
            noise = torch.Generator().manual_seed(99 + source)
            caches[source] = torch.randn((MAX_LEN, DIM), generator=noise).bfloat16()
        for index, ratio in enumerate(ratios):
            noise = torch.Generator().manual_seed(index)
            kv_source = max((one for one in kv_sources if one <= index), default=None) if ratio else None
            self.layers.append(
                layer_class(
                    prefix=f"model.layers.{index}.attn", layer_id=index, compress_ratio=ratio, window_size=WINDOW,
                    max_model_len=MAX_LEN, max_num_batched_tokens=MAX_TOKENS, topk_indices_buffer=self.topk,
                    is_index_source=index in index_sources, is_kv_source=index in kv_sources,
                    kv_source_layer_id=kv_source, swa_cache_layer=SimpleNamespace(prefix=f"{index}.swa"),
                    index_source_layer_id=max((one for one in index_sources if one <= index), default=None) if ratio else None,
                    compressed_cache_prefix=f"{kv_source}.attn" if ratio else None, scale=0.04, head_dim=DIM,
                    nope_head_dim=448, rope_head_dim=64, attn_sink=torch.zeros(HEADS), n_local_heads=HEADS,
                    _use_aiter_sparse_mla=False, rotary_emb=SimpleNamespace(cos_sin_cache=None),
                    window=torch.randn((MAX_LEN, DIM), generator=noise).bfloat16(),
                    cache=caches[kv_source],
                )
            )  # fmt: skip
            self.layers[-1].swa_cache_layer.kv_cache = self.layers[-1].window

    def prefill(
        self, metadata: Callable[[int], Any], q: Any, layers: range | None = None, tokens: int | None = None
    ) -> list[Any]:
        """Each layer's prefill output under the module's context; `metadata` gives a layer's window metadata."""
        outputs = []
        for index in layers if layers is not None else range(len(self.layers)):
            layer = self.layers[index]
            if layer.is_index_source:
                choice = torch.Generator().manual_seed(1000 + index)
                chosen = torch.randint(0, TOPK, self.topk.shape, generator=choice, dtype=torch.int32)
                # an entry is no further back than its column: a row that every token of that many has
                self.topk.copy_(torch.minimum(chosen, torch.arange(TOPK, dtype=torch.int32)))
                self.made.workspace.clobber(self.indexer)
            output = torch.zeros_like(q)
            window = metadata(index)
            compressed = None
            if layer.compress_ratio:
                made = SimpleNamespace(block_table=window.block_table, block_size=128)
                compressed = self.compressed_metadata.setdefault(layer.kv_source_layer_id, made)
            layer._forward_prefill(
                q=q, positions=torch.arange(len(q)), compressed_k_cache=layer.cache if compressed else None,
                swa_k_cache=layer.window, output=output, attn_metadata=compressed, swa_metadata=window,
            )  # fmt: skip
            outputs.append(output)
            self.made.workspace.clobber(self.scratch)
        return outputs


class Batch:
    """The tensors of a step that all its metadata objects share.

    Args:
        made: a release's module.
        seq_lens, query_lens: of each request; those of one token are decodes and come first.
    """

    def __init__(self, made: ModuleType, seq_lens: tuple[int, ...], query_lens: tuple[int, ...]) -> None:
        self.made = made
        self.decodes = sum(length == 1 for length in query_lens)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        self.starts, self.starts_cpu = starts, starts.clone()
        self.query_lens = torch.tensor(query_lens, dtype=torch.int32)
        self.replay_start = torch.zeros(len(seq_lens), dtype=torch.int32)

    def metadata(self, **changed: Any) -> Any:
        """A window group's metadata object of this step, with a gather length tensor and a block table of its own."""
        first = self.decodes
        replay = changed.get("replay_start")
        replay = self.replay_start if replay is None else replay
        prefix = (self.seq_lens - self.query_lens - replay).clamp(min=0, max=WINDOW - 1)
        made = self.made.Metadata(
            num_decodes=first,
            num_prefills=len(self.seq_lens) - first,
            num_decode_tokens=first,
            num_prefill_tokens=int(self.starts[-1]) - first,
            seq_lens=self.seq_lens,
            prefill_seq_lens=self.seq_lens[first:],
            prefill_seq_lens_cpu=self.seq_lens[first:].clone(),
            prefill_query_lens_cpu=self.query_lens[first:].clone(),
            prefill_gather_lens=(self.query_lens + prefix)[first:],
            prefill_window_size=WINDOW,
            prefill_max_model_len=MAX_LEN,
            prefill_max_num_batched_tokens=MAX_TOKENS,
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts_cpu,
            block_table=torch.zeros((len(self.seq_lens), 4), dtype=torch.int32),
            block_size=32,
            is_valid_token=torch.ones(MAX_TOKENS, dtype=torch.bool),
            token_to_req_indices=torch.zeros(MAX_TOKENS, dtype=torch.int32),
            decode_swa_indices=None,
            decode_swa_lens=None,
            decode_swa_ragged_indices=None,
            decode_swa_ragged_indptr=None,
        )
        if self.made.Metadata.has_replay_start:
            made.replay_start = self.replay_start
        vars(made).update(changed)
        return made
