"""The layout that is recommended, and the line: words that every release knows."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_cli.planner import weights
from deepinfer_cli.serve import partition, settings
from deepinfer_cli.serve.advice import advise, what_would
from deepinfer_cli.serve.command import serve_line
from deepinfer_cli.serve.line import parse_options
from deepinfer_cli.serve.memory import Layout, Load
from deepinfer_cli.serve.recommend import CONTEXTS

RELEASES = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")


def test_eight_a100_80() -> None:
    advice = advise(8, 79.25)
    assert advice.best is not None and advice.best.layout == Layout(8)
    assert advice.load.context == 1_048_576 and advice.load.speculative
    assert advice.best.tokens > 6_000_000
    for word in ("33 % more", "into 288, which Marlin pads to 384", "so is the whole KV cache", "264 GiB"):
        assert any(word in reason for reason in advice.reasons), word


def test_eight_a6000_48_take_whole_experts_and_a_shorter_context() -> None:
    advice = advise(8, 47.99)
    assert advice.best is not None
    assert advice.best.layout == Layout(8, expert_parallel=True)
    assert advice.load.context == 262_144 and advice.best.tokens >= 262_144
    assert any("not tested" in reason for reason in advice.reasons)


def test_eight_a100_40_do_not_do_and_the_sum_says_why() -> None:
    advice = advise(8, 40)
    assert advice.best is None and advice.line is None
    assert "8 x 40.0 GiB is 320 GiB; the weights without Engram are 286.4 GiB" in advice.reasons
    assert "of 36.4 GiB" in advice.reasons[1]
    assert any(text.startswith("8 GPUs of 48 GB") for text in advice.nearest)


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 6, 8, 10, 16])
@pytest.mark.parametrize("gib", [24, 48, 80, 141])
@pytest.mark.parametrize("release", ["0.30.0", "0.33.0"])
def test_what_is_recommended_is_legal_and_fits(gpus: int, gib: int, release: str) -> None:
    advice = advise(gpus, gib, Load(release=release))
    if advice.best is None:
        assert advice.reasons
        return
    layout = advice.best.layout
    assert layout.gpus <= gpus and partition.check(layout.partition).legal
    assert layout.pp <= partition.most_stages(release)
    assert advice.best.tokens >= advice.load.context
    assert all(stage.total < advice.best.usable for stage in advice.best.stages)
    assert not (advice.load.speculative and layout.pp > 1)


@pytest.mark.parametrize(
    "layout", [Layout(8), Layout(8, expert_parallel=True), Layout(4, (20, 20)), Layout(1, (14, 6, 20))]
)
def test_the_line_has_no_setting_that_is_known_to_go_wrong(layout: Layout) -> None:
    line = serve_line(layout, replace(Load(), speculative=5 if layout.pp == 1 else 0))
    words = shlex.split(line)
    environ = dict(word.split("=", 1) for word in words[: words.index("vllm")])
    options = parse_options(words)
    assert settings.check(settings.Settings(environ, options)) == []
    assert json.loads(options["engram-config"]) == {"cpu_offload": True}
    assert (options.get("pipeline-parallel-size"), environ.get(partition.VARIABLE)) == (
        (str(layout.pp), partition.text(layout.partition)) if layout.pp > 1 else (None, None)
    )


def test_a_context_that_is_asked_for_is_kept_or_refused() -> None:
    asked = advise(8, 47.99, context=131_072)
    assert asked.load.context == 131_072
    assert advise(8, 47.99, context=1_048_576).best is None


def test_huge_pages_are_asked_for_where_the_host_needs_them() -> None:
    def config(host: float | None, release: str = "0.33.0") -> dict[str, bool]:
        line = advise(8, 80, Load(release=release), host=host).line
        assert line is not None
        found: dict[str, bool] = json.loads(parse_options(shlex.split(line))["engram-config"])
        return found

    assert config(None) == config(1_024) == {"cpu_offload": True}
    assert config(256) == {"cpu_offload": True, "use_thp": True}
    assert config(320, "0.30.0") == {"cpu_offload": True}
    # 264 GiB, rounded up, and no huge pages: Engram is on the GPUs
    assert config(256, "0.30.0") == config(128) == {"cpu_offload": False}


def test_stages_are_recommended_where_only_they_hold_it_from_033_on() -> None:
    for gpus, gib, load, context in (
        (16, 40, Load(), None),
        (32, 40, Load(), None),
        (24, 24, Load(batched_tokens=2_048), None),
        (8, 80, Load(concurrency=13), 1_048_576),
    ):
        advice = advise(gpus, gib, load, context)
        assert advice.best is not None and advice.best.layout.partition == (20, 20)
        assert advice.line is not None and advice.line.startswith("VLLM_PP_LAYER_PARTITION=20,20 vllm serve ")
        assert any("two stages of one GPU each" in reason for reason in advice.reasons)
        old = advise(gpus, gib, replace(load, release="0.32.0"), context)
        assert old.best is None and old.line is None
        first, *rest = old.nearest
        assert first.startswith(f"these GPUs with vLLM 0.33.0: {advice.best.layout.name}, context ")
        assert not any(" x PP" in one for one in rest), old.nearest


def test_a_long_enough_context_comes_before_whole_experts_and_fewer_stages_before_all() -> None:
    assert any(text.startswith("16 GPUs of this size: TP8 x PP2") for text in advise(8, 40).nearest)
    advice = advise(16, 40)
    assert advice.best is not None and advice.best.layout == Layout(8, (20, 20))
    assert advice.load.context == 1_048_576 and advice.load.speculative == 0
    assert all(advise(16, gib).best.layout.pp == 1 for gib in (48, 64, 80))  # type: ignore[union-attr]


def test_what_would_do_is_tried_and_is_the_least() -> None:
    stages, nearest = advise(1, 24).nearest  # no served card has more than 80 GB
    assert stages.startswith("16 GPUs of this size with --max-num-batched-tokens 2048: TP8 x PP2 (20,20)")
    assert nearest.startswith("8 GPUs of 48 GB: TP8 with expert parallelism, context ")
    assert advise(1, 24, Load(release="0.32.0")).nearest == (nearest,)
    assert advise(4, 96).best is not None and advise(4, 80).best is None
    shorter = advise(8, 48, context=1_048_576).nearest[0]
    assert shorter.startswith(
        "these GPUs with a shorter context: TP8 with expert parallelism, context 262,144"
    )
    # 24 of them would take the layout of 16
    assert advise(16, 24).nearest[0].startswith("these GPUs with --max-num-batched-tokens 2048: TP8 x PP2")
    assert not any("24 GPUs of this size" in one for one in advise(16, 24).nearest)
    # 80 GB cards are what it has
    same = advise(8, 79.25, Load(concurrency=20.95), context=1_048_576)
    assert same.best is None and not any("8 GPUs of 80 GB" in one for one in same.nearest)
    alone = advise(8, 80, Load(concurrency=60), context=1_048_576).nearest
    assert alone[0].startswith("these GPUs with a shorter context: TP8")


def test_what_leaves_next_to_nothing_is_called_uncertain_and_comes_last() -> None:
    assert [", within what is uncertain of" in one for one in advise(8, 40).nearest] == [False, True, True]
    tight = Load(batched_tokens=1_024, sequences=16, speculative=0, vision=False, utilization=0.97)
    assert any("less than what is uncertain of this estimate" in one for one in advise(8, 40, tight).reasons)
    # what is above a share that cards ran out of memory at is not there to count on
    assert any("and what is above a share of 0.95" in one for one in advise(4, 80, tight).reasons)
    assert not any("uncertain" in one for one in advise(8, 80, replace(tight, utilization=0.92)).reasons)


def test_a_context_that_takes_nearly_all_of_the_cache_is_called_uncertain() -> None:
    (said,) = (one for one in advise(8, 48).reasons if "uncertain" in one)
    assert said.startswith("one request of 262,144 takes all but 0.0") and "names the longest" in said
    assert not any("uncertain" in one for one in advise(8, 48, context=65_536).reasons)


def test_hints_buy_no_more_than_their_layout_takes_and_give_up_options_first() -> None:
    # 16 of the 32 that there are
    assert any(one.startswith("16 GPUs of 32 GB: TP8 x PP2 (20,20)") for one in advise(32, 24).nearest)
    low = advise(8, 48, Load(utilization=0.8)).nearest
    assert low[0].startswith("these GPUs with --gpu-memory-utilization 0.92: TP8")
    sliced = list(what_would(8, 48, Load(), CONTEXTS, experts=False))
    assert sliced[0].startswith("these GPUs without --no-expert-parallel: TP8 with expert parallelism")
    assert sliced[1:] and not any("expert parallelism" in one for one in sliced[1:])
    assert not any("64 GB" in one for one in advise(4, 48).nearest)  # nobody sells them


def test_cards_that_are_left_over_have_a_true_reason() -> None:
    (said,) = (one for one in advise(16, 48).reasons if "are left over" in one)
    assert "no more stages than it needs" in said
    (old,) = (one for one in advise(16, 48, Load(release="0.32.0")).reasons if "are left over" in one)
    assert "vLLM 0.32.0 runs no pipeline" in old


def test_concurrency_is_held_at_once() -> None:
    few, many = (advise(8, 80, Load(concurrency=count)) for count in (1, 20))
    assert few.best is not None and many.best is not None
    assert many.load.context < few.load.context == 1_048_576
    assert many.best.pool.concurrency >= 20


@pytest.mark.release
@pytest.mark.parametrize("version", RELEASES)
def test_every_word_of_the_line_is_one_of_the_release(version: str, pristine_release) -> None:
    root = Path(pristine_release(version)) / "vllm"
    known = (root / "engine/arg_utils.py").read_text()
    layout = Layout(2, (20, 20), expert_parallel=True)
    load = Load(release=version, sequences=64, vision=False)
    words = shlex.split(serve_line(layout, load, huge_pages=load.huge_pages))
    names = [word for word in words if word.startswith("--")]
    assert len(names) == 13
    for name in names:
        assert f'"{name}"' in known, name
    engram = (root / "config/engram.py").read_text()
    assert "cpu_offload: bool" in engram and ("use_thp: bool" in engram) is load.huge_pages
    assert '"dspark"' in (root / "config/speculative.py").read_text()
    assert '"marlin"' in (root / "config/kernel.py").read_text()
    cache = (root / "config/cache.py").read_text()
    assert '"fp8"' in cache and "gpu_memory_utilization: float = Field(default=0.92" in cache
    assert f'"{partition.VARIABLE}"' in (root / "envs.py").read_text()
    # the experts' width, and the block size of the indexer's cache
    experts = (root / "model_executor/layers/fused_moe/oracle/mxfp4.py").read_text()
    marlin = experts.index("Mxfp4MoeBackend.BATCHED_MARLIN):\n")
    assert (
        f"intermediate_size = round_up(intermediate_size, {weights.MARLIN_WIDTH})"
        in experts[marlin : marlin + 200]
    )
    indexer = (root / "v1/attention/backends/mla/indexer.py").read_text()
    start = indexer.index("class DeepseekV41IndexerBackend")
    assert (
        "return [64 if current_platform.is_device_capability_family(90) else 128]"
        in indexer[start : start + 1200]
    )
