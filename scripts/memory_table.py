#!/usr/bin/env python3
"""Rewrites the table of the payload's buffers between the markers of README.md.

What each allocates is asked of the payload itself: its functions on tensors without memory (torch's `meta` device), its tables of
variants, its own arithmetic. `--check` changes nothing and exits 1 if the table is not current, or lacks a function that allocates. Needs torch and triton.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from scripts import memory_sizes as sizes
from scripts.memory_sizes import MIB, Served

ROOT = Path(__file__).parents[1]
README, PAYLOAD = ROOT / "README.md", ROOT / "overlays" / "deepinfer_sm80"
BEGIN, END = "<!-- memory:begin -->", "<!-- memory:end -->"
NEVER = "no"


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


WORKSPACE = "vLLM's workspace; in its profile run"
CALL = "torch, for one call"
BUFFERS = (
    Buffer("`wo_a` as bfloat16 rows", "enable", (), "a weight; loaded before the profile run",
           "layers x 8,192 x 4,096 x 2 B / TP", sizes.unpacked),
    Buffer("KV rows that prefill gathers", "enable", ("attention/prefill.py::_workspace",), WORKSPACE,
           "4 x (`--max-model-len` + 128 + batched tokens) x 1 KiB", sizes.gathered, "with `--max-model-len`"),
    Buffer("the indexer's logits, prefill", "enable", ("bindings/sparse_attn_indexer.py::_logits",),
           f"{CALL}; in the profile run", "at most 512 MiB, each row rounded up to 1 KiB", sizes.prefill_logits),
    Buffer("the indexer's logits, decode", "enable", ("bindings/sparse_attn_indexer.py::_logits",),
           f"{CALL}; in the profile run up to 512 MiB", "decoded tokens x `--max-model-len` x 4 B", sizes.decode_logits,
           "with `--max-model-len`"),
    Buffer("the indexer's queries", "enable", ("ops/indexer_q/__init__.py::indexer_q",), f"{CALL}; in the profile run",
           "batched tokens x 32 x (128 + 4) B", sizes.queries),
    Buffer("index tables that layers share", "accelerate",
           ("attention/shared.py::profiled", "ops/combine/__init__.py::combine"), "torch, for a step; in the profile run",
           "batched tokens x 770 x 4 B", sizes.index_tables),
    Buffer("partial results of decode", "accelerate", ("ops/sparse_decode/triton.py::launch",),
           f"{CALL}; not in the profile run, whose peak is that of a larger step",
           "tokens x splits x 64 / TP x 514 x 4 B, by the number of SMs", sizes.partials),
    Buffer("parts of mHC's projection", "accelerate", ("ops/mhc/tilelang.py::scratch",), f"{CALL}; in the profile run",
           "batched tokens x slices x 104 B", sizes.mix_parts),
    Buffer("decode's ragged lists", "accelerate",
           ("ops/ragged/__init__.py::build_ragged", "ops/ragged/triton.py::launch"),
           "torch, then copied into vLLM's own", "decoded tokens x (128 + 2 x 512) x 4 B", sizes.lists),
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
    packed = sizes.unpacked(base) * 33 // 64
    rest = sorted(_enable() - {name for one in BUFFERS for name in _ops_of(one)})
    return f"""For {base.tokens:,} batched tokens, {base.sequences} sequences and a context of {base.context:,}:

{table()}

- Nothing grows with the length of a request. Two are sized for `--max-model-len`: at {short.context:,} the gathered rows take
  {_mib(sizes.gathered(short))}, and the logits of decode {_mib(sizes.decode_logits(short))}.
- Packed, as the checkpoint has it, `wo_a` takes {_mib(packed)} at TP8. The gathered rows are what vLLM's own portable class asks for.
- The logits of decode have one row for each token that is decoded, as DeepGEMM's have: with DSpark's {draft.drafts} draft tokens
  {_mib(sizes.decode_logits(draft))}. vLLM's profile run reserves 512 MiB for them, and a decode step can also use what that run's activations took. More than
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
    named = {place for one in BUFFERS for place in one.where} | set(AS_STOCK)
    if wrong := named ^ set(sizes.allocations(PAYLOAD)):
        print(
            f"allocates and is in no row, or the other way round: {', '.join(sorted(wrong))}", file=sys.stderr
        )
        return 1
    text = README.read_text(encoding="utf-8")
    new = _rewritten(text)
    if options.check:
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
