"""The memory estimate: known sums, and that every part answers to what should change it."""

from __future__ import annotations

import pytest

from deepinfer_cli.serve import memory
from deepinfer_cli.serve.memory import Layout, Load


def test_the_checkpoint_adds_up_but_for_its_drafter() -> None:
    known = (memory.ENGRAM + memory.EXPERTS + memory.ATTENTION_SPLIT + memory.ATTENTION_WHOLE
             + memory.SHARED_EXPERTS + memory.EMBEDDING + memory.HEAD + memory.VISION)  # fmt: skip
    assert known == pytest.approx(474.6, abs=0.05) and known < memory.CHECKPOINT
    checkpoint, engram = memory.CHECKPOINT * memory.GIB, memory.ENGRAM * memory.GIB
    assert checkpoint == pytest.approx(510e9, rel=0.01)
    assert engram == pytest.approx(203e9, rel=0.01)


def test_one_gpu_without_padding_holds_the_weights_once() -> None:
    load = Load(speculative=False, context=32_768)
    stage = memory.estimate(Layout(1), 400, load).stages[0]
    weights = stage.total - stage.parts["workspace"] - stage.parts["allowance"]
    # wo_a takes two bytes where the checkpoint has one
    assert weights == pytest.approx(275.7 + 5.2 + 1.25 + 1.4 + 2.6 + 0.9)
    assert stage.token_bytes == 1800


@pytest.mark.parametrize(("tp", "factor"), [(1, 1.0), (2, 1.0), (4, 640 / 576), (8, 384 / 288)])
def test_marlin_pads_the_experts_of_narrow_slices(tp: int, factor: float) -> None:
    assert memory.expert_padding(Layout(tp)) == pytest.approx(factor)
    assert memory.expert_padding(Layout(tp, expert_parallel=True)) == 1.0
    found = memory.estimate(Layout(tp), 400, Load()).stages[0].parts["experts"]
    assert found == pytest.approx(275.7 * factor / tp)


def test_kv_bytes_are_those_of_the_sources_that_a_stage_has() -> None:
    def of(*sizes: int) -> list[int]:
        return [stage.token_bytes for stage in memory.estimate(Layout(8, sizes), 80, Load()).stages]

    assert of(40) == [1800]
    assert of(20, 20) == [1080, 720]
    assert of(14, 6, 20) == [720, 360, 720]
    assert of(1, 1, 6, 6, 6, 20) == [0, 0, 360, 360, 360, 720]


def test_stages_share_the_layers_and_only_the_ends_have_embedding_head_and_drafter() -> None:
    first, middle, last = memory.estimate(Layout(2, (14, 6, 20)), 64, Load()).stages
    assert first.parts["experts"] + middle.parts["experts"] + last.parts["experts"] == pytest.approx(
        275.7 / 2
    )
    assert (first.parts["embedding and head"], last.parts["embedding and head"]) == (0.65, 0.65)
    assert middle.parts["embedding and head"] == 0
    assert first.parts["DSpark"] == middle.parts["DSpark"] == 0 < last.parts["DSpark"]


def test_engram_on_the_gpus_is_where_its_layers_are() -> None:
    def of(*sizes: int) -> list[float]:
        load = Load(engram_on_gpu=True)
        return [stage.parts["Engram"] for stage in memory.estimate(Layout(4, sizes), 80, load).stages]

    assert of(20, 20) == [pytest.approx(188.8 / 4), 0]
    assert of(14, 6, 20) == [pytest.approx(94.4 / 4), pytest.approx(94.4 / 4), 0]


def test_the_workspace_is_the_larger_of_two() -> None:
    assert memory.workspace(Load(context=1_048_576)) == pytest.approx(4 * 1_056_896 / 2**20)
    old = memory.workspace(Load("0.31.0", 1_048_576))
    assert old == pytest.approx(132 * 40 * 2**20 / 2**30)
    assert memory.workspace(Load("0.33.0", 262_144)) == pytest.approx(132 * 40 * 2**18 / 2**30)


def test_what_does_not_fit_has_no_pool_and_says_the_sum() -> None:
    found = memory.estimate(Layout(8), 47.99, Load())
    assert found.tokens == 0
    assert "45.9 experts" in found.arithmetic and f"GiB of {47.99 * 0.92:.1f} GiB" in found.arithmetic
    assert found.stages[0].total > found.usable


def test_the_pool_grows_by_what_is_free() -> None:
    small, large = (memory.estimate(Layout(8), gib, Load()).tokens for gib in (80, 81))
    assert large - small == pytest.approx(0.92 * 2**30 / 1800, rel=1e-6)
