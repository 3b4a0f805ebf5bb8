"""vLLM's KV accounting: figures that vLLM itself has reported, and that each input does what it does there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer_cli.planner import kv, shape
from deepinfer_cli.planner.kv import Traffic
from deepinfer_cli.planner.shape import FLASH
from deepinfer_cli.validate.e2e import model

GIB = 2**30
SMALL = shape.from_config(model.config(model.ModelOptions(engram=False)))
BASE = Traffic(8_192, 2_048, 64)


def pool(given: shape.Shape = SMALL, traffic: Traffic = BASE, gib: float = 4.0, partition=None) -> kv.Pool:
    partition = partition or (given.layers,)
    return kv.pool(given, partition, traffic, [int(gib * GIB)] * len(partition))


def test_the_pool_that_one_h200_reported() -> None:
    # vLLM 0.33.0, the small model, blocks of 64, 34.11 GiB for KV: 3,608,586 tokens, 440.50x
    found = kv.pool(SMALL, (8,), BASE, [525_518 * 69_696])
    assert (found.tokens, f"{found.concurrency:.2f}") == (3_608_586, "440.50")
    assert f"{525_518 * 69_696 / GIB:.2f}" == "34.11"
    assert (found.block_bytes, found.request_blocks) == ((69_696,), 128 + 8 * 133 + 1)


@pytest.mark.parametrize(
    ("options", "traffic", "available", "blocks", "tokens"),
    [
        ({}, Traffic(8_192, 2_048, 64), GIB, 15_406, 105_788),
        ({}, Traffic(8_192, 2_048, 128), GIB, 7_767, 56_357),
        ({"draft": True}, Traffic(8_192, 2_048, 64, 5), GIB, 15_406, 95_177),
        ({"draft": True}, Traffic(8_192, 2_048, 128, 5), GIB, 7_767, 50_417),
        ({"positions": 1_048_576}, Traffic(262_272, 4_096, 64), GIB, 15_406, 653_072),
        ({"positions": 1_048_576}, Traffic(262_272, 4_096, 128), GIB, 7_767, 492_282),
        # 5.04 GiB, as vLLM's own profiling found them
        ({}, Traffic(8_192, 2_048, 128), 39_113 * 138_240, 39_113, 283_803),
    ],
)
def test_what_engines_of_the_end_to_end_matrix_reported(options, traffic, available, blocks, tokens) -> None:
    """Engines of vLLM 0.33.0 on one H200, on 2026-11-30; blocks of 128 where vLLM was told of capability (8, 0)."""
    given = shape.from_config(model.config(model.ModelOptions(**options)))
    found = kv.pool(given, (8,), traffic, [available])
    assert (found.blocks, found.tokens) == (blocks, tokens)


def test_the_real_model_on_one_stage() -> None:
    found = pool(FLASH, Traffic(1_048_576, 8_192, 128, 5), 20)
    assert found.block_bytes == (1_800 * 128,)
    assert [(group.kind, len(group.pages)) for group in found.groups] == [
        ("window", 11), ("window", 11), ("window", 11), ("window", 10), ("compressed", 8), ("ring", 3),
    ]  # fmt: skip
    # 8,192 blocks of 128 tokens, four windows of 127 + 2 x 8,192 tokens in flight, and a ring
    assert found.request_blocks == 8_192 + 4 * 517 + 1
    assert found.blocks == 20 * GIB // (1_800 * 128)


def test_blocks_of_64_and_256_split_the_windows_otherwise() -> None:
    def windows(size: int) -> list[int]:
        found = pool(FLASH, Traffic(1_048_576, 8_192, size))
        return [len(group.pages) for group in found.groups if group.kind == "window"]

    assert windows(64) == [6] * 5 + [5] * 2
    assert windows(128) == [10] * 4
    assert windows(256) == [20] * 2


@pytest.mark.parametrize(
    ("changed", "blocks"),
    [
        ({}, 1_193),
        ({"context": 4_096}, 64 + 8 * 129 + 1),
        ({"batched_tokens": 512}, 128 + 8 * (36 + 1) + 1),
        ({"async_scheduling": False}, 128 + 8 * (68 + 1) + 1),
        ({"block_size": 128}, 64 + 8 * 133 + 1),
        ({"speculative_tokens": 5}, 1_193),
    ],
)
def test_what_one_request_may_hold(changed: dict[str, int], blocks: int) -> None:
    assert pool(traffic=replace(BASE, **changed)).request_blocks == blocks


def test_more_stages_hold_more_in_flight_and_the_least_stage_decides() -> None:
    two = kv.pool(SMALL, (4, 4), BASE, [4 * GIB, 5 * GIB])
    assert two.request_blocks == 128 + 8 * (196 + 1) + 1
    # stage 1 has layer 2's caches or its ring, whichever is more; stage 2 has layer 4's
    assert two.block_bytes == (32_768, 37_440 + 8_640)
    assert (two.limiting, two.blocks) == (1, 5 * GIB // 46_080)


def test_drafted_layers_are_windows_of_the_last_stage() -> None:
    drafted = replace(SMALL, draft_layers=3)
    without, with_ = (pool(drafted, replace(BASE, speculative_tokens=count)) for count in (0, 5))
    assert (
        sum(len(group.pages) for group in with_.groups) - sum(len(group.pages) for group in without.groups)
        == 3
    )
    assert with_.request_blocks - without.request_blocks == 3 * 133


@pytest.mark.parametrize(("tokens", "rows"), [(0, 8), (5, 8), (6, 8), (7, 16), (14, 16), (15, 32)])
def test_a_ring_holds_a_step_and_the_row_before_it(tokens: int, rows: int) -> None:
    ring = next(page for page in kv.pages(SMALL, 64, tokens) if page.kind == "ring")
    assert (ring.tokens, ring.bytes) == (rows, rows * 4_096)


def test_pages_are_rounded_up_to_576_bytes() -> None:
    sizes = {(page.layer, page.what): page.bytes for page in kv.pages(FLASH, 128, 0)}
    assert sizes[2, "kv"] == 37_440 and sizes[2, "index"] == 8_640
    assert sizes[20, "kv"] == 74_880 and sizes[20, "index"] == 17_280
    assert sizes[39, "window"] == 19_008
    assert all(size % 576 == 0 for (_, what), size in sizes.items() if what != "ring")


@pytest.mark.parametrize("size", [16, 48, 100])
def test_blocks_that_vllm_cannot_have(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        kv.pages(FLASH, size, 0)


def test_a_stage_that_reads_an_earlier_ones_cache_holds_it_again() -> None:
    spans = kv.stages(FLASH, (14, 14, 12))
    assert [kv.borrowed(FLASH, span) for span in spans] == [None, None, 20]
    assert [kv.borrowed(FLASH, span) for span in kv.stages(FLASH, (14, 6, 20))] == [None, None, None]
    assert [kv.borrowed(FLASH, span) for span in kv.stages(FLASH, (1, 19, 20))] == [None, None, None]
    published = pool(FLASH, Traffic(1_048_576, 8_192, 128, 5), partition=(14, 14, 12))
    assert published.block_bytes == (2 * 46_080, 46_080 + 92_160, 92_160)


def test_vllm_starts_only_with_one_request_and_the_block_it_holds_back() -> None:
    needed = pool().request_blocks
    for blocks, starts in ((needed, False), (needed + 1, True)):
        assert kv.pool(SMALL, (8,), BASE, [blocks * 69_696]).starts is starts
    assert not kv.pool(SMALL, (8,), BASE, [-1]).starts


def test_a_config_is_read_as_the_model_is_written() -> None:
    assert SMALL.ratios == model.RATIOS and SMALL.kv_sources == model.KV_SOURCES
    assert SMALL.cuts == (1, 2, 4)
    drafted = shape.from_config(model.config(model.ModelOptions(draft=True)))
    assert (drafted.draft_layers, drafted.draft_experts, drafted.engram.layers) == (1, 16, (1, 3))
    with pytest.raises(ValueError, match="compress_ratios"):
        shape.from_config({"model_type": "llama"})


@pytest.mark.parametrize(
    ("partition", "lacking"),
    [
        ((40,), []),
        ((14, 26), []),
        ((8, 6, 26), []),
        # seen to fail with vLLM 0.33.0 on two H200
        ((20, 20), [(1, "ring")]),
        ((14, 6, 20), [(2, "ring")]),
        ((2, 38), [(0, "window"), (0, "window"), (0, "compressed"), (0, "ring")]),
    ],
)
def test_stages_that_own_no_layer_of_a_group(
    partition: tuple[int, ...], lacking: list[tuple[int, str]]
) -> None:
    found = kv.missing(FLASH, partition, Traffic(8_192))
    assert [(index, group.kind) for index, group in found] == lacking
