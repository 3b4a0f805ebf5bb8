#!/usr/bin/env python3
"""Rewrites the table of the payload's buffers between the markers of README.md.

What each allocates is asked of the payload itself: its functions on tensors without memory (torch's `meta` device), its tables of
variants, its own arithmetic. `--check` changes nothing and exits 1 if the table is not current. Needs torch and triton.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepinfer_cli.planner.shape import FLASH, Shape

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- memory:begin -->", "<!-- memory:end -->"
MIB = 2**20
# requests whose rows prefill gathers at once: a constant of vLLM's portable class
CHUNK_REQUESTS = 4
# what one chunk of prefill's logits may take, and what vLLM reserves for it: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
LOGITS_BYTES = 512 * MIB
NEVER = "no"


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


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that the payload takes of a GPU.

    Attributes:
        name: of the row.
        group: `enable` or `accelerate`.
        where: the payload's functions that allocate it, `file::function`.
        owner: whose it is, and where vLLM counts it.
        formula: its size, in words.
        size: bytes.
        grows: whether it grows with the context.
    """

    name: str
    group: str
    where: tuple[str, ...]
    owner: str
    formula: str
    size: Callable[[Served], int]
    grows: str = NEVER


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
    rows: int = CHUNK_REQUESTS * shared.widest(layer, False)[1]
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
    elements = LOGITS_BYTES // 4
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


WORKSPACE = "vLLM's workspace; in its profile run"
CALL = "torch, for one call"
BUFFERS = (
    Buffer("`wo_a` as bfloat16 rows", "enable", (), "a weight; loaded before the profile run",
           "layers x 8,192 x 4,096 x 2 B / TP", unpacked),
    Buffer("KV rows that prefill gathers", "enable", ("attention/prefill.py::_workspace",), WORKSPACE,
           "4 x (`--max-model-len` + 128 + batched tokens) x 1 KiB", gathered, "with `--max-model-len`"),
    Buffer("the indexer's logits, prefill", "enable", ("bindings/sparse_attn_indexer.py::_logits",),
           f"{CALL}; in the profile run", "at most 512 MiB, each row rounded up to 1 KiB", prefill_logits),
    Buffer("the indexer's logits, decode", "enable", ("bindings/sparse_attn_indexer.py::_logits",),
           f"{CALL}; in the profile run up to 512 MiB", "decoded tokens x `--max-model-len` x 4 B", decode_logits,
           "with `--max-model-len`"),
    Buffer("the indexer's queries", "enable", ("ops/indexer_q/__init__.py::indexer_q",), f"{CALL}; in the profile run",
           "batched tokens x 32 x (128 + 4) B", queries),
    Buffer("index tables that layers share", "accelerate",
           ("attention/shared.py::profiled", "ops/combine/__init__.py::combine"), "torch, for a step; in the profile run",
           "batched tokens x 770 x 4 B", index_tables),
    Buffer("partial results of decode", "accelerate", ("ops/sparse_decode/triton.py::launch",),
           f"{CALL}; not in the profile run, whose peak is that of a larger step",
           "tokens x splits x 64 / TP x 514 x 4 B, by the number of SMs", partials),
    Buffer("parts of mHC's projection", "accelerate", ("ops/mhc/tilelang.py::scratch",), f"{CALL}; in the profile run",
           "batched tokens x slices x 104 B", mix_parts),
    Buffer("decode's ragged lists", "accelerate",
           ("ops/ragged/__init__.py::build_ragged", "ops/ragged/triton.py::launch"),
           "torch, then copied into vLLM's own", "decoded tokens x (128 + 2 x 512) x 4 B", lists),
)  # fmt: skip
# results in stock's place and of stock's size, and an op that nothing calls
AS_STOCK = (
    "ops/mhc/check.py::pre_outputs",
    "ops/mhc_fused_post_pre_delayed/__init__.py::mhc_fused_post_pre_delayed",
    "ops/mhc_post/__init__.py::mhc_post",
    "ops/mhc_post_with_sqrsum/__init__.py::mhc_post_with_sqrsum",
)


def section() -> str:
    """All that stands between the markers."""
    base, short, draft = Served(), Served(context=131_072), Served(drafts=5)
    packed = unpacked(base) * 33 // 64
    rest = sorted(_enable() - {name for one in BUFFERS for name in _ops_of(one)})
    return f"""For {base.tokens:,} batched tokens, {base.sequences} sequences and a context of {base.context:,}:

{table()}

- Nothing grows with the length of a request. Two are sized for `--max-model-len`: at {short.context:,} the gathered rows take
  {_mib(gathered(short))}, and the logits of decode {_mib(decode_logits(short))}.
- Packed, as the checkpoint has it, `wo_a` takes {_mib(packed)} at TP8. The gathered rows are what vLLM's own portable class asks for.
- The logits of decode have one row for each token that is decoded, as DeepGEMM's have: with DSpark's {draft.drafts} draft tokens
  {_mib(decode_logits(draft))}. vLLM's profile run reserves 512 MiB for them, and a decode step can also use what that run's activations took. More than
  both comes out of what `--gpu-memory-utilization` leaves: for long contexts with many sequences lower `--max-num-seqs`.
- The other ops of the enable group ({", ".join(rest)})
  allocate nothing, and what the accelerate group returns in stock's place is of stock's size."""


def _enable() -> set[str]:
    from deepinfer_cli.overlay import manifest

    return set(manifest.load().enable)


def _ops_of(buffer: Buffer) -> tuple[str, ...]:
    """The enable group's ops whose files allocate `buffer`."""
    files = {
        "bindings/sparse_attn_indexer.py": ("indexer_prefill", "indexer_decode"),
        "ops/indexer_q/__init__.py": ("indexer_q",), "attention/prefill.py": ("attention",),
    }  # fmt: skip
    return tuple(op for place in buffer.where for op in files.get(place.partition("::")[0], ()))


def table(served: Served | None = None) -> str:
    """The table in Markdown, at TP8 and TP4."""
    base = served or Served()
    lines = ["| Buffer | Group | Whose, and where vLLM counts it | Size | TP8 | TP4 | Grows with the context |",
             "| --- | --- | --- | --- | ---: | ---: | --- |"]  # fmt: skip
    for one in BUFFERS:
        sizes = (one.size(replace(base, tp=tp)) for tp in (8, 4))
        shown = " | ".join(_mib(size) for size in sizes)
        lines.append(f"| {one.name} | {one.group} | {one.owner} | {one.formula} | {shown} | {one.grows} |")
    return "\n".join(lines)


def _mib(size: int) -> str:
    value = size / MIB
    return f"{value:,.0f} MiB" if value >= 10 else f"{value:.1f} MiB"


def _rewritten(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{README.name} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if the table is not current")
    options = parser.parse_args(arguments)
    text = README.read_text(encoding="utf-8")
    new = _rewritten(text)
    if options.check:
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


def allocations(root: Path) -> Iterator[str]:
    """Every function of the payload at `root`, tests' inputs and oracles aside, that allocates a tensor: `file::function`."""
    import ast

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
    import ast

    return any("jit" in ast.unparse(one) or ast.unparse(one).startswith("T.") for one in node.decorator_list)


if __name__ == "__main__":
    sys.exit(main())
