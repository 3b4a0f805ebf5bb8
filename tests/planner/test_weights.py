"""Weights by part from a model's shape: the published checkpoint, the small model, and what an option moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer_cli.planner import buffers, kv, shape, weights
from deepinfer_cli.planner.shape import FLASH
from deepinfer_cli.planner.weights import Split
from deepinfer_cli.validate.e2e import model

GIB = 2**30
SMALL = shape.from_config(model.config(model.ModelOptions()))


def test_the_published_checkpoint_part_by_part() -> None:
    parts = weights.stage(
        FLASH, range(40), Split(stored=True, draft=True, engram_on_gpu=True), first=True, last=True
    )
    sizes = {name: size / GIB for name, size in parts.items()}
    assert sum(sizes.values()) == pytest.approx(475.3, abs=0.1)
    assert sizes["DSpark"] / 3 == pytest.approx(2.5, abs=0.05)
    # as published in GB: attention 5.2 with its compressors and indexers, shared experts 1.4, embedding and head 2.6
    published = {"attention": 5.2, "shared experts": 1.4, "embedding and head": 2.6}
    assert {name: round(parts[name] / 1e9, 1) for name in published} == pytest.approx(published, abs=0.06)
    assert sizes["experts"] + 3 * weights.experts(FLASH, 128) / GIB == pytest.approx(275.7, abs=0.05)


def test_wo_a_is_unpacked() -> None:
    split = Split()
    packed = sum(weights.attention(FLASH, layer, replace(split, stored=True)) for layer in range(40))
    loaded = sum(weights.attention(FLASH, layer, split) for layer in range(40))
    # a byte more for each of 8,192 x 4,096 values, and scales for each row instead of each block
    assert loaded - packed == pytest.approx(40 * 8_192 * 4_096, rel=0.15)


def test_the_small_model_is_as_its_own_estimate_says() -> None:
    found = weights.stage(SMALL, range(8), Split(vision=False), first=True, last=True)
    rough = model.weight_bytes(model.ModelOptions())
    assert sum(found.values()) == pytest.approx(rough, rel=0.02)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_stages_add_up_to_the_whole(tp: int) -> None:
    split = Split(tp, draft=True)
    whole = weights.stage(FLASH, range(40), split, first=True, last=True)
    one = weights.stage(FLASH, range(20), split, first=True, last=False)
    two = weights.stage(FLASH, range(20, 40), split, first=False, last=True)
    for part, size in whole.items():
        repeated = 2 if part == "vision" else 1
        assert one[part] + two[part] == pytest.approx(repeated * size), part


def test_whole_experts_are_not_padded() -> None:
    slices, whole = (
        weights.stage(FLASH, range(40), Split(8, kept), first=True, last=True) for kept in (False, True)
    )
    assert slices["experts"] == pytest.approx(whole["experts"] * 384 / 288)
    assert {part for part in whole if whole[part] != slices[part]} == {"experts"}


def test_vision_of_a_known_shape_is_split_and_of_the_published_model_is_not() -> None:
    assert weights.vision(SMALL, 2) < 0.6 * weights.vision(SMALL, 1)
    assert weights.vision(FLASH, 8) == weights.vision(FLASH, 1) == int(0.9 * GIB)


@pytest.mark.parametrize(
    ("options", "tp", "layers", "batched", "gib"),
    [
        ({}, 1, range(8), 2_048, 6.72),
        ({"draft": True}, 1, range(8), 2_048, 7.50),
        ({"positions": 1_048_576}, 1, range(8), 4_096, 7.26),
        ({}, 2, range(8), 2_048, 3.61),
        ({}, 1, range(4), 2_048, 3.57),
        ({}, 1, range(4, 8), 2_048, 3.20),
    ],
)
def test_what_vllm_said_that_loading_took(options, tp, layers, batched, gib) -> None:
    """`Model loading took`: vLLM 0.33.0 with the overlay's sm80 layout on H200s, on 2026-11-30, without vision.

    What vLLM counts has the allocator's segments and, with two GPUs, the communicators' buffers in it.
    """
    given = shape.from_config(model.config(model.ModelOptions(**options)))
    first, last, draft = layers.start == 0, layers.stop == 8, "draft" in options
    split = Split(tp, vision=False, draft=draft)
    held = sum(weights.stage(given, layers, split, first=first, last=last).values())
    traffic = kv.Traffic(8_192, batched, 128, 5 if draft else 0)
    served = buffers.Served(sequences=16, tp=tp, stages=1 if len(layers) == 8 else 2, last=last, draft=draft)
    held += buffers.tables(given, layers, traffic, served)
    assert held / GIB == pytest.approx(gib, rel=0.06)
