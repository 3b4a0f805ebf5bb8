"""Cases of the two ops that write into a paged cache: positions, groups, blocks, pages and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..spec import Case

Make = Callable[..., Case]


def smoke(case: Make) -> tuple[Case, ...]:
    """What any writer must do; sizes and addresses of its own rows are each op's."""
    return (
        case("one-token", tokens=1),
        case("one-token-that-ends-no-group", tokens=1, ratio=2, skipped=0.0),
        case("one-token-that-ends-a-group", tokens=1, ratio=2, first=7, skipped=0.0),
        case("ratio-2-from-an-odd-position", tokens=80, ratio=2, first=4097),
        case("ratio-4", tokens=60, ratio=4, first=2),
        case("scattered-positions", tokens=70, ratio=2, scattered=True, rows=3000),
        case("everything-skipped", tokens=9, skipped=1.1),
        case("no-tokens", tokens=0),
        case("block-32", tokens=70, block_size=32),
        case("block-37", tokens=50, block_size=37),
        case("block-1", tokens=9, block_size=1),
        case("pages-of-other-layers-between", tokens=30, page_gap=5 * 576),
        case("table-rows-apart", tokens=30, table_stride=67),
        case("more-rows-than-slots", tokens=30, spare_rows=5),
    )


def full(case: Make, blocks_over_2gib: int) -> tuple[Case, ...]:
    """Prefill chunks, a million positions, and a cache of `blocks_over_2gib` pages."""
    return (
        case("8192-tokens", "full", tokens=8192, gpu_only=True),
        case("8192-tokens-ratio-2", "full", tokens=8192, ratio=2, first=131_073, gpu_only=True),
        case("8192-edges", "full", tokens=8192, kind="edges", gpu_only=True),
        case("16384-scattered-over-a-million", "full", tokens=16384, scattered=True, rows=1 << 20, ratio=2,
             block_size=128, gpu_only=True, memory_bytes=1 << 30),
        case("cache-over-2GiB", "full", tokens=4000, num_blocks=blocks_over_2gib, gpu_only=True,
             memory_bytes=3 << 30),
    )  # fmt: skip


def bench(case: Make) -> tuple[Case, ...]:
    """Decode batches and prefill chunks of a layer whose groups are of one token, and of one with two."""
    shared: dict[str, Any] = {"skipped": 0.0, "gpu_only": True}
    sizes = [(tokens, 1) for tokens in (1, 24, 2048, 8192, 16384)] + [(8192, 2)]
    return tuple(
        case(f"{tokens}-tokens-ratio-{ratio}", "bench", tokens=tokens, ratio=ratio, **shared)
        for tokens, ratio in sizes
    )
