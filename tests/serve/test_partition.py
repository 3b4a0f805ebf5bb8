"""Where vLLM can cut the model, and what is said where it cannot."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest

from deepinfer_cli.serve import partition


def shared_cache_is_local(sizes: tuple[int, ...]) -> bool:
    """The rule as vLLM has it: a layer's KV source, the last source not after it, is built on its own stage."""
    starts = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    for begin, end in pairwise(starts):
        for layer in range(max(begin, 2), end):
            if max(source for source in (2, 8, 14, 20) if source <= layer) < begin:
                return False
    return True


def every_stage_has_a_source(sizes: tuple[int, ...]) -> bool:
    """Without a compressed cache and an indexer a stage supports other KV cache layouts than its neighbours."""
    starts = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    return all(any(begin <= source < end for source in (2, 8, 14, 20)) for begin, end in pairwise(starts))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_partition_is_judged_as_vllm_does(stages: int) -> None:
    judged = 0
    for chosen in combinations(range(1, 40), stages - 1):
        ends = (*chosen, 40)
        sizes = tuple(end - start for start, end in zip((0, *chosen), ends, strict=True))
        right = shared_cache_is_local(sizes) and every_stage_has_a_source(sizes)
        assert partition.check(sizes).legal is right, sizes
        judged += partition.check(sizes).legal
    assert judged == len(partition.legal(stages)) > 0


def test_the_known_ones() -> None:
    assert partition.CUTS == (8, 14, 20) and partition.MAX_STAGES == 4
    assert partition.legal(1) == ((40,),)
    assert partition.legal(2) == ((20, 20), (14, 26), (8, 32))
    assert set(partition.legal(3)) == {(8, 12, 20), (14, 6, 20), (8, 6, 26)}
    assert partition.legal(4) == ((8, 6, 6, 20),)
    assert partition.legal(5) == partition.legal(6) == ()


def test_the_published_layout_is_refused_by_name_and_the_nearest_is_printed() -> None:
    verdict = partition.check((14, 14, 12))
    assert not verdict.legal and verdict.nearest == (14, 6, 20)
    assert "published layout of six GPUs" in verdict.reason
    assert "before layer 28 is inside the group of layer 20" in verdict.reason
    assert "NotImplementedError" in verdict.reason


@pytest.mark.parametrize(
    ("sizes", "stages", "word", "near"),
    [
        ((21, 20), None, "add up to 41", (20, 20)),
        ((40, 0), None, "a stage has no layer", (20, 20)),
        ((0, 40), None, "a stage has no layer", (20, 20)),
        ((20, 20), 3, "has 2 stages, the pipeline has 3", (8, 12, 20)),
        ((13, 14, 13), None, "before layer 13 is inside the group of layer 8", (14, 6, 20)),
        ((5,) * 8, None, "before layer 5 is inside the group of layer 2", None),
        (
            (2, 38),
            None,
            "the cut before layer 2 makes a first stage without a KV source: vLLM 0.30 to 0.33 asserts",
            (8, 32),
        ),
        ((1, 19, 20), None, "the cut before layer 1 makes a first stage without a KV source", (8, 12, 20)),
        ((1, 1, 6, 6, 6, 20), None, "a first stage without a KV source", None),
    ],
)
def test_what_is_refused_says_why(sizes, stages, word, near) -> None:
    verdict = partition.check(sizes, stages)
    assert not verdict.legal and word in verdict.reason and verdict.nearest == near


@pytest.mark.parametrize("text", ["", "a,b", "20;20", "20,", "2.5,3"])
def test_what_is_no_partition_is_no_partition(text: str) -> None:
    with pytest.raises(ValueError, match="no list of layers"):
        partition.parse(text)
    assert partition.parse(" 20, 20") == (20, 20)


def test_what_is_refused_in_a_few_words() -> None:
    assert partition.short((20, 20)) is None and partition.short((40,)) is None
    assert partition.short((14, 14, 12)) == "no stage can begin at layer 28: at 8, 14, 20 only"
    assert partition.short((2, 10, 28)) == "no stage can begin at layer 2 or 12: at 8, 14, 20 only"
    assert partition.short(partition.even(6)) == "it has 6 stages, and at most 4 start"


def test_legal_partitions_by_distance() -> None:
    assert partition.by_distance((9, 31), 2) == [(8, 32), (14, 26), (20, 20)]
    assert partition.by_distance((0, 40), 2) == list(partition.legal(2))
    assert (
        partition.by_distance(partition.even(6), 4) == [(8, 6, 6, 20)]
        and partition.by_distance((5,) * 8, 8) == []
    )


def test_both_reasons_are_said_of_a_partition_that_has_both() -> None:
    reason = partition.check((2, 10, 28)).reason
    assert "before layer 12 is inside the group of layer 8" in reason and "without a KV source" in reason
    assert "relays" not in partition.check((2, 38)).reason


def test_no_release_before_033_runs_stages() -> None:
    for release in ("0.30.0", "0.31.0", "0.32.0", "0.32.1+cu130"):
        why = partition.no_stages(release)
        assert why is not None and f"vLLM {release} runs no pipeline" in why
        assert "vision MoE routing requires input_ids" in why and partition.most_stages(release) == 1
    for release in ("0.33.0", "0.33.0+cu130", "0.34.0"):
        assert partition.no_stages(release) is None and partition.most_stages(release) == 4


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0", "0.33.0"])
def test_the_releases_say_what_is_said_of_them(version: str, pristine_release) -> None:
    root = Path(pristine_release(version)) / "vllm"
    attention = (root / "models/deepseek_v41/attention.py").read_text()
    assert attention.count("NotImplementedError(") >= 2 and "kv-sharing" in attention
    runner = (root / "v1/worker/gpu/model_runner.py").read_text()
    guarded = (
        'if not requires_raw_input_tokens(self.model):\n                model_inputs["input_ids"] = None'
    )
    assert (guarded in runner) is (partition.minor(version) >= 33)
    assert 'model_inputs["input_ids"] = None' in runner
    assert (partition.no_stages(version) is None) is (guarded in runner)
    experts = (root / "models/deepseek_v4/nvidia/model.py").read_text()
    assert 'raise ValueError("DeepSeek V4 vision MoE routing requires input_ids.")' in experts
    layouts = (root / "v1/attention/backends/utils.py").read_text()
    resolve = layouts[layouts.index("def resolve_kv_cache_layout") :]
    assert "Workers disagree on supported KV cache layouts" in resolve
    model = (root / "models/deepseek_v41/nvidia/model.py").read_text()
    assert "supports_aux_hidden_states_over_pp" not in model
    even = (root / "distributed/utils.py").read_text()
    space: dict = {
        "envs": type("envs", (), {"VLLM_PP_LAYER_PARTITION": None}),
        "logger": __import__("logging"),
    }
    start = even.index("def get_pp_indices")
    exec(even[start : even.index("\n\n\n", start)], space)
    for stages in range(1, 9):
        ours, starts = (
            partition.even(stages),
            [space["get_pp_indices"](40, rank, stages) for rank in range(stages)],
        )
        assert tuple(end - begin for begin, end in starts) == ours
