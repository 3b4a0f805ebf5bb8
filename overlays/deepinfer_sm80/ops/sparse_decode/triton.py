"""The launches of sparse decode."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..spec import Variant
from .attend import attend_kernel
from .choice import MERGE, blocks_of, pick, variants
from .merge import merge_kernel

__all__ = ["launch", "variants"]
# a cache, the slots of all tokens in it, and where each token's begin
List = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def launch(
    q: torch.Tensor,
    out: torch.Tensor,
    lists: list[List],
    scale: float,
    sink: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
) -> None:
    """Launches the kernel on checked arguments, and the merge if there are splits."""
    tokens, heads = q.shape[:2]
    variant, splits = _choose(q, out, lists)
    (swa, *swa_list), (extra, *extra_list) = lists[0], lists[-1]
    # scratch, and where there is nothing to read, something to point at
    count = tokens * splits * heads if splits > 1 else 0
    part = torch.empty(count * 514, dtype=torch.float32, device=q.device)
    stats = part[count * 512 :]
    sinks = part if sink is None else sink
    angles = part if cos_sin_cache is None else cos_sin_cache
    places = part.view(torch.int64) if positions is None else positions
    stride = 0 if cos_sin_cache is None else cos_sin_cache.stride(0)
    swa_inverse, swa_shift = inverse(swa.shape[1])
    extra_inverse, extra_shift = inverse(extra.shape[1])
    given = len(lists) - 1 + 2 * (sink is not None) + 4 * (positions is not None)
    attend_kernel[(blocks_of(variant, heads), splits, tokens)](
        q,
        out,
        part,
        stats,
        swa,
        *swa_list,
        extra,
        *extra_list,
        sinks,
        places,
        angles,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        swa.stride(0),
        extra.stride(0),
        swa_inverse,
        extra_inverse,
        stride,
        swa.shape[0] * swa.shape[1],
        extra.shape[0] * extra.shape[1],
        swa.shape[1],
        extra.shape[1],
        given,
        swa_shift,
        extra_shift,
        heads,
        splits,
        scale,
        **variant.constexprs,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
    if splits > 1:
        merge_kernel[(heads, tokens)](
            out,
            part,
            stats,
            sinks,
            places,
            angles,
            out.stride(0),
            out.stride(1),
            stride,
            given,
            heads,
            splits,
            **MERGE.constexprs,
            num_warps=MERGE.num_warps,
            num_stages=MERGE.num_stages,
        )


def _choose(q: torch.Tensor, out: torch.Tensor, lists: list[List]) -> tuple[Variant, int]:
    """The variant for these tensors, and the number of splits."""
    tokens, heads = q.shape[:2]
    address = 0
    for cache, _indices, _indptr in lists:
        address |= cache.data_ptr() | cache.stride(0)
    for rows in (q, out):
        address |= rows.data_ptr() | 2 * (rows.stride(0) | rows.stride(1))
    # vLLM sizes a list for its tokens times the widest row: what a token has is on the device only
    widths = tuple(-(-indices.shape[0] // tokens) for _cache, indices, _indptr in lists)
    return pick(tokens, heads, widths, address % 16 == 0)


@lru_cache(64)
def inverse(block_size: int) -> tuple[int, int]:
    """A factor and a shift: slot // block_size is `slot * factor >> shift` for every slot below 2^31, without overflow."""
    shift = 31 + (block_size - 1).bit_length()
    return -(-(1 << shift) // block_size), shift
