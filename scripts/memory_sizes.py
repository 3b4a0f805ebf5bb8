"""What each of the payload's buffers takes, asked of the payload itself, and the functions of it that allocate any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepinfer_cli.planner import buffers
from deepinfer_cli.planner.shape import FLASH, Shape

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Served:
    """What buffers are sized for.

    Attributes:
        tp: GPUs of the stage.
        tokens: `--max-num-batched-tokens`.
        sequences: `--max-num-seqs`.
        context: `--max-model-len`.
        drafts: DSpark's tokens in each step.
    """

    tp: int = 8
    tokens: int = 8_192
    sequences: int = 256
    context: int = 1_048_576
    drafts: int = 0
    model: Shape = FLASH

    @property
    def decoded(self) -> int:
        """Tokens that are decoded at once, at most."""
        return self.sequences * (1 + self.drafts)


def unpacked(served: Served) -> int:
    """`wo_a` of every layer as bfloat16 rows."""
    model = served.model
    rows = model.o_groups * model.o_rank
    columns = model.heads * model.head_dim // model.o_groups
    return model.layers * rows * columns * 2 // served.tp


def gathered(served: Served) -> int:
    """What prefill asks of vLLM's workspace, by the payload's own `widest`."""
    from deepinfer_sm80.attention import shared

    model = served.model
    layer = SimpleNamespace(
        compress_ratio=min(ratio for ratio in model.ratios if ratio), max_model_len=served.context,
        window_size=model.window, max_num_batched_tokens=served.tokens,
    )  # fmt: skip
    rows: int = buffers.PREFILL_REQUESTS * shared.widest(layer, False)[1]
    return rows * model.head_dim * 2


def logits(rows: int, width: int) -> int:
    """Bytes of the indexer's logits."""
    import torch
    from deepinfer_sm80.bindings import sparse_attn_indexer

    q = torch.empty(1, device="meta")
    found: Any = sparse_attn_indexer._logits((q, None), rows, width, False)
    return int(found.untyped_storage().nbytes())


def prefill_logits(served: Served) -> int:
    """The most that a chunk takes: vLLM cuts it by rows times keys, and the payload rounds a row's width up."""
    elements = buffers.INDEX_LOGITS // 4
    return max(logits(rows, min(elements // rows, served.context)) for rows in range(1, served.tokens + 1))


def decode_logits(served: Served) -> int:
    """One row for each token that is decoded, as wide as the longest context may be."""
    return logits(served.decoded, served.context // min(ratio for ratio in served.model.ratios if ratio))


def queries(served: Served) -> int:
    """Codes and weights of the indexer's queries; the indexer is not split over GPUs."""
    return served.tokens * served.model.index_heads * (served.model.index_dim + 4)


def partials(served: Served) -> int:
    """Partial results of decode: the most of all numbers of tokens, on the card that splits most."""
    from deepinfer_sm80 import gate
    from deepinfer_sm80.ops.sparse_decode import choice

    heads, most = served.model.heads // served.tp, 0
    for widths in ((served.model.window,), (served.model.window, served.model.index_top_k)):
        for arch in gate.SM_COUNTS:
            for tokens in range(1, served.decoded + 1):
                limit = gate.SMEM_LIMITS[arch]
                _, splits = choice._pick(tokens, heads, widths, True, gate.SM_COUNTS[arch], limit)
                most = max(most, tokens * splits * heads if splits > 1 else 0)
    return most * (served.model.head_dim + 2) * 4


def index_tables(served: Served) -> int:
    """What stands for the tables in vLLM's profile run, made by the payload as it is there."""
    import torch
    from deepinfer_sm80.attention import shared

    class Context:
        attn_metadata = None

    context = Context()
    selected = torch.empty((served.tokens, served.model.index_top_k), dtype=torch.int32, device="meta")
    layer = SimpleNamespace(topk_indices_buffer=selected, window_size=served.model.window)
    with shared.profiled(layer, context, served.tokens):
        pass
    return int(shared.of(context).reserved.untyped_storage().nbytes())


def mix_parts(served: Served) -> int:
    """Parts of mHC's projection: the most of all numbers of tokens."""
    import torch
    from deepinfer_sm80.ops.mhc import tilelang as mhc

    most = 0
    for table in (mhc.PRE_TABLE, mhc.FUSED_TABLE):
        for tokens in {served.tokens, *(row.tokens for row in table if row.tokens)}:
            streams = torch.empty((tokens, served.model.streams, served.model.hidden), device="meta")
            parts = mhc.scratch(mhc.row_for(table, tokens, served.model.hidden), streams)
            most = max(most, int(parts.untyped_storage().nbytes()))
    return most


def lists(served: Served) -> int:
    """Ragged lists of a decode step: windows, and Top-K of each compression ratio."""
    model = served.model
    kinds = [model.window] + [model.index_top_k] * len({ratio for ratio in model.ratios if ratio})
    return sum(served.decoded * width + served.decoded + 1 for width in kinds) * 4


def allocations(root: Path) -> Iterator[str]:
    """Every function of the payload at `root`, tests' inputs and oracles aside, that allocates a tensor: `file::function`."""
    names = {"empty", "zeros", "ones", "full", "arange", "cat", "stack", "get_simultaneous"}
    names |= {f"{name}_like" for name in ("empty", "zeros", "ones", "full")}
    names |= {f"new_{name}" for name in ("empty", "zeros", "ones", "full", "tensor")}
    for path in sorted(root.rglob("*.py")):
        if path.stem in {"reference", "workloads", "inputs", "pages", "suites", "sparse_inputs"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.FunctionDef)
                and "T.Kernel" not in ast.unparse(node)
                and not _is_kernel(node)
            ):
                calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
                if any(isinstance(call, ast.Attribute) and call.attr in names for call in calls):
                    yield f"{path.relative_to(root).as_posix()}::{node.name}"


def _is_kernel(node: Any) -> bool:
    return any("jit" in ast.unparse(one) or ast.unparse(one).startswith("T.") for one in node.decorator_list)
