"""The memory estimate: known sums, and that every part answers to what should change it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer_cli.planner import buffers, kv, weights
from deepinfer_cli.planner.shape import FLASH
from deepinfer_cli.serve import memory
from deepinfer_cli.serve.memory import Layout, Load


def parts(layout: Layout, load: Load | None = None, gib: float = 80) -> list[dict[str, float]]:
    return [stage.parts for stage in memory.estimate(layout, gib, load or Load()).stages]


def workspace(load: Load) -> float:
    return buffers.workspace(FLASH, range(FLASH.layers), load.traffic, load.release) / memory.GIB


def test_the_shapes_add_up_to_the_published_checkpoint() -> None:
    assert pytest.approx(510.35e9, rel=5e-4) == weights.checkpoint(FLASH)
    assert memory.ENGRAM == 188.8
    (whole,) = parts(Layout(1))
    drafted = FLASH.draft_layers * FLASH.draft_experts / FLASH.experts * whole["experts"] / FLASH.layers
    # what is published as the experts' size has the drafter's in it
    assert whole["experts"] + drafted == pytest.approx(275.7, abs=0.05)


@pytest.mark.parametrize(("tp", "factor"), [(1, 1.0), (2, 1.0), (4, 640 / 576), (8, 384 / 288)])
def test_marlin_pads_the_experts_of_narrow_slices(tp: int, factor: float) -> None:
    assert memory.expert_padding(Layout(tp)) == pytest.approx(factor)
    assert memory.expert_padding(Layout(tp, expert_parallel=True)) == 1.0
    (one,), (alone,) = parts(Layout(tp)), parts(Layout(1))
    assert one["experts"] == pytest.approx(alone["experts"] * factor / tp)


def test_tensor_parallelism_splits_most_of_attention_and_no_cache() -> None:
    (one,), (eight,) = parts(Layout(1)), parts(Layout(8))
    assert one["attention"] / 8 < eight["attention"] < one["attention"] / 4
    assert one["mixing"] == eight["mixing"] and one["vision"] == eight["vision"]
    assert one["shared experts"] == pytest.approx(8 * eight["shared experts"])
    sizes = {memory.estimate(Layout(tp), 500, Load()).stages[0].block_bytes for tp in (1, 2, 4, 8)}
    assert sizes == {1_800 * 128}


def test_kv_bytes_are_those_of_the_sources_that_a_stage_has() -> None:
    def of(*sizes: int) -> list[int]:
        found = memory.estimate(Layout(8, sizes), 80, Load(speculative=0))
        return [stage.block_bytes // 128 for stage in found.stages]

    assert of(40) == [1_800]
    # a block holds either: layer 20's caches take 720 bytes a token, five window pages of 20 layers in four groups 742
    assert of(20, 20) == [1_080, 5 * 19_008 // 128]
    assert of(14, 6, 20) == [720, 360, 5 * 19_008 // 128]
    # layers 0 and 1 have windows alone
    assert of(1, 1, 6, 6, 6, 20) == [19_008 // 128, 19_008 // 128, 360, 360, 360, 5 * 19_008 // 128]


def test_stages_share_the_layers_and_only_the_ends_have_embedding_and_head() -> None:
    first, middle, last = parts(Layout(2, (14, 6, 20)), Load(speculative=0), 64)
    (whole,) = parts(Layout(1), Load(speculative=0))
    for part in ("experts", "attention", "shared experts", "mixing"):
        shared = whole[part] if part == "mixing" else None
        total = first[part] + middle[part] + last[part]
        assert total == pytest.approx(shared) if shared else total < whole[part]
    assert first["embedding and head"] == last["embedding and head"] == whole["embedding and head"] / 4
    assert middle["embedding and head"] == 0
    assert first["DSpark"] == middle["DSpark"] == last["DSpark"] == 0
    drafted = parts(Layout(2, (14, 6, 20)))
    assert [stage["DSpark"] > 0 for stage in drafted] == [False, False, True]


def test_each_option_changes_its_part_and_no_other() -> None:
    (base,) = parts(Layout(4))
    for change, changed in (
        ({"vision": False}, {"vision"}),
        ({"engram_on_gpu": True}, {"Engram"}),
        ({"speculative": 0}, {"DSpark", "tables"}),
        ({"context": 131_072}, {"workspace", "tables"}),
        ({"batched_tokens": 2_048}, {"workspace", "tables", "activations"}),
        ({"sequences": 512}, {"tables"}),
        ({"release": "0.31.0"}, {"workspace"}),
    ):
        (other,) = parts(Layout(4), replace(Load(), **change))
        assert {part for part in base if base[part] != other[part]} == changed, change


def test_engram_on_the_gpus_is_where_its_layers_are() -> None:
    def of(*sizes: int) -> list[float]:
        on, off = (parts(Layout(4, sizes), Load(engram_on_gpu=on)) for on in (True, False))
        return [one["Engram"] - other["Engram"] for one, other in zip(on, off, strict=True)]

    assert of(20, 20) == [pytest.approx(188.83 / 4, abs=0.01), 0]
    assert of(14, 6, 20) == [pytest.approx(94.42 / 4, abs=0.01), pytest.approx(94.42 / 4, abs=0.01), 0]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_pinned_tables_are_rounded_up_on_the_host(tp: int) -> None:
    host = memory.estimate(Layout(tp), 500, Load()).host
    # values of a table: 91.6 GiB, scales: 2.9
    assert host.tables == pytest.approx(188.83, abs=0.01)
    assert host.rounded == 2 * (128 + 4)
    assert host.needed(huge_pages=True) == pytest.approx(188.83 + tp, abs=0.01)
    assert memory.estimate(Layout(tp), 500, Load(engram_on_gpu=True)).host.rounded == 0


def test_the_workspace_is_the_larger_of_two() -> None:
    assert workspace(Load(context=1_048_576)) == pytest.approx(4 * 1_056_896 / 2**20)
    old = workspace(Load("0.31.0", 1_048_576))
    assert old == pytest.approx(132 * 40 * 2**20 / 2**30)
    assert workspace(Load("0.33.0", 262_144)) == pytest.approx(132 * 40 * 2**18 / 2**30)


def test_stages_without_full_length_layers_have_half_the_workspace() -> None:
    first, last = parts(Layout(4, (20, 20)))
    assert first["workspace"] == pytest.approx(last["workspace"] / 2, rel=0.01)


def test_what_does_not_fit_has_no_pool_and_says_the_sum() -> None:
    found = memory.estimate(Layout(8), 47.99, Load())
    assert found.tokens == 0 and not found.serves()
    assert "44.8 experts" in found.arithmetic and f"GiB of {found.usable:.1f} GiB" in found.arithmetic
    assert found.stages[0].total > found.usable


def test_the_pool_is_what_vllm_makes_of_what_is_left() -> None:
    found = memory.estimate(Layout(8), 80, Load())
    left = int((found.usable - found.stages[0].total) * memory.GIB)
    again = kv.pool(FLASH, (40,), Load().traffic, [left])
    assert (found.tokens, found.pool.blocks) == (again.tokens, again.blocks)
    assert found.serves(found.pool.concurrency) and not found.serves(found.pool.concurrency + 0.01)


def test_a_pool_for_less_than_one_request_does_not_serve() -> None:
    large = next(gib / 10 for gib in range(500, 700) if memory.estimate(Layout(8), gib / 10, Load()).fits)
    found = memory.estimate(Layout(8), large, Load())
    assert found.fits and not found.serves() and found.pool.concurrency < 1


def test_uneven_stages() -> None:
    found = memory.estimate(Layout(2, (14, 26), uneven=(2, 4)), 64, Load(batched_tokens=2_048))
    assert (found.layout.name, found.layout.gpus, found.layout.stock) == ("TP2 + TP4 (14,26)", 6, False)
    assert [stage.tp for stage in found.stages] == [2, 4]
    even = memory.estimate(Layout(2, (14, 26)), 64, Load(batched_tokens=2_048))
    assert found.stages[0].parts["experts"] == even.stages[0].parts["experts"]
    # sliced four ways, padded
    assert found.stages[1].parts["experts"] == pytest.approx(even.stages[1].parts["experts"] / 2 * 640 / 576)
