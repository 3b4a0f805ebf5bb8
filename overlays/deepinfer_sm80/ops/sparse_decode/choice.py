"""The variants of the sparse decode kernels, and which of them, in how many splits, serves a call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ... import gate
from ..spec import Variant
from . import attend, merge


def _signature(module: Any) -> dict[str, str]:
    """Types of the arguments that a kernel's module lists."""
    pointers: dict[str, str] = module.POINTERS
    return pointers | dict.fromkeys(module.STRIDES, "i64") | dict.fromkeys(module.SIZES, "i32")


def _variant(heads: int, rows: int, num_warps: int, *, align: int = 16, measured: str = "") -> Variant:
    return Variant(
        name=f"{heads}x{rows}" + ("" if align == 16 else "-any"),
        kernel=attend.attend_kernel,
        signature=_signature(attend) | {"scale": "fp32"},
        constexprs={"BLOCK_H": heads, "BLOCK_K": rows, "ALIGN": align},
        num_warps=num_warps,
        num_stages=1,
        expects_mma=True,
        measured=measured,
    )


MAX_SPLITS = 64
MERGE = Variant(
    name="merge",
    kernel=merge.merge_kernel,
    signature=_signature(merge),
    constexprs={"MAX_SPLITS": MAX_SPLITS, "CHUNK": 8},
    num_warps=4,
    num_stages=1,
)
# measured: microseconds on an H200, 128 + 512 rows, T tokens, H heads, sm80 code
ANY = _variant(16, 16, 4, align=1)
SMALL = _variant(
    16, 32, 4, measured="T=1: 13.0, 32x64 14.2; T=6: H=64 16.6 (15.5), H=32 14.2 (14.6); 16x16 at T=1: 19.3"
)
LARGE = _variant(
    32, 64, 8, measured="T=24: H=64 35.8, 16x32 41.1; H=32 21.0 (23.6); T=96: 110 (130), 62.0 (77.4)"
)
# variant → bytes of shared memory
SHARED_BYTES = {ANY.name: 49_152, SMALL.name: 49_152, LARGE.name: 98_304}
# variant → microseconds that a tile takes on its way through an SM, and that it takes from the SM's other tiles
TILE_COST = {ANY.name: (2.0, 1.2), SMALL.name: (2.6, 1.8), LARGE.name: (5.2, 5.2)}
# microseconds of the merge: to launch it, and for each KiB of partial results, written and read
MERGE_COST = (3.0, 0.00025)


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that may be launched on `arch`."""
    limit = gate.SMEM_LIMITS[arch]
    return (*(one for one in (ANY, SMALL, LARGE) if SHARED_BYTES[one.name] <= limit), MERGE)


def pick(tokens: int, heads: int, widths: tuple[int, ...], aligned: bool) -> tuple[Variant, int]:
    """The variant for so many tokens and heads, and the number of splits; `widths`: rows per token that each list may have."""
    device = gate.device()
    limit = device.smem_limit if device else gate.SMEM_LIMITS["sm80"]
    sm_count = device.sm_count if device else gate.SM_COUNTS["sm80"]
    return _pick(tokens, heads, widths, aligned, sm_count, limit)


@lru_cache(4096)
def _pick(
    tokens: int, heads: int, widths: tuple[int, ...], aligned: bool, sm_count: int, limit: int
) -> tuple[Variant, int]:
    variant = SMALL if aligned else ANY
    # with fewer tiles than SMs the large variant leaves SMs idle that the small one uses
    large = tokens * blocks_of(LARGE, heads) * _tiles(LARGE, widths) >= sm_count
    if aligned and large and heads > 16 and limit >= SHARED_BYTES[LARGE.name]:
        variant = LARGE
    return variant, choose_splits(variant, tokens, heads, widths, sm_count)


def choose_splits(variant: Variant, tokens: int, heads: int, widths: tuple[int, ...], sm_count: int) -> int:
    """Splits per token: the number with the shortest modelled time, of those that give no split more tiles than it must."""
    tiles = max(1, _tiles(variant, widths))
    blocks = tokens * blocks_of(variant, heads)
    alone, shared = TILE_COST[variant.name]
    found: dict[int, float] = {}
    for per_split in range(-(-tiles // MAX_SPLITS), tiles + 1):
        splits = -(-tiles // per_split)
        on_one_sm = -(-blocks * splits // sm_count) * per_split
        merging = MERGE_COST[0] + MERGE_COST[1] * 4 * tokens * heads * splits if splits > 1 else 0.0
        found.setdefault(splits, max(alone * per_split, shared * on_one_sm) + merging)
    return min(found, key=lambda splits: found[splits])


def blocks_of(variant: Variant, heads: int) -> int:
    """Programs that share a token's heads."""
    return -(-heads // int(variant.constexprs["BLOCK_H"]))


def _tiles(variant: Variant, widths: tuple[int, ...]) -> int:
    return sum(-(-width // int(variant.constexprs["BLOCK_K"])) for width in widths)
