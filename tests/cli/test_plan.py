"""`deepinfer plan` as a user runs it: on machines that are said or made up, and what is impossible on any."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli import cli_plan
from deepinfer_cli.commands import plan_request
from deepinfer_cli.detect import host
from deepinfer_cli.detect.gpu import Gpu, GpuReport
from deepinfer_cli.planner import chart
from deepinfer_cli.serve import settings
from deepinfer_cli.serve.advice import advise
from deepinfer_cli.serve.line import parse_options
from deepinfer_cli.serve.memory import Load
from tests.cli.conftest import Cli, Run
from tests.conftest import FakeVllm

Plan = Callable[..., Run]
PUBLISHED = ("--layout", "tp2pp3", "--partition", "14,14,12")


@pytest.fixture
def plan(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """`plan("--gpus", 8, …)` on a machine without GPUs, without asking any vLLM."""
    monkeypatch.setattr(plan_request, "detect_gpus", lambda: GpuReport((), None, None, "none", None, None))
    return lambda *words: cli("plan", "--no-check", *words)


def of(gpus: int, gib: float | str) -> tuple[object, ...]:
    return ("--gpus", gpus, "--gpu-memory", gib)


def data(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.document["data"]
    return found


def test_eight_a100_80_get_layouts_a_pool_and_a_line(plan: Plan) -> None:
    run = plan(*of(8, 80))
    assert run.code == 0
    assert run.out.splitlines()[1].startswith("TP8\tserves\t8\t")
    assert "TP3, TP5, TP6, TP7\t64 heads and 8 output groups must divide evenly, by 1, 2, 4 or 8" in run.out
    line = run.out.splitlines()[-1]
    assert (
        line.startswith("vllm serve ")
        and settings.check(settings.Settings({}, parse_options(shlex.split(line)))) == []
    )
    found = data(plan(*of(8, 80), "--json"))
    assert found["line"] == line and found["layout"]["name"] == "TP8"
    (stage,) = found["layout"]["stages"]
    assert sum(stage["parts_gib"].values()) == pytest.approx(stage["sum_gib"], abs=0.01)
    assert stage["sum_gib"] + stage["kv_gib"] == pytest.approx(found["layout"]["usable_gib"], abs=0.01)
    assert found["layout"]["pool"]["tokens"] > 6_000_000


def test_doctor_says_the_same(plan: Plan, cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_cli.commands import doctor

    cards = tuple(Gpu(i, "NVIDIA Card", f"GPU-{i}", (8, 0), 80 * 2**30) for i in range(8))
    report = GpuReport(cards, "580.65.06", "13.0", "nvml", None, None)
    for module in (doctor, plan_request):
        monkeypatch.setattr(module, "detect_gpus", lambda: report)
    monkeypatch.setattr(host, "memory_bytes", lambda: 256 * 2**30)
    for name in ("VLLM_PP_LAYER_PARTITION",):
        monkeypatch.delenv(name, raising=False)
    theirs = cli("doctor", "--target", fake.site, "--json").document["data"]["serve"]
    ours = data(plan("--target", fake.site, "--json"))
    assert ours["line"] == theirs["line"] and '"use_thp": true' in ours["line"]
    assert ours["layout"]["pool"]["tokens"] == theirs["layout"]["tokens"]
    assert ours["gpus"] == 8 and ours["load"]["release"] == fake.version


def test_one_layout_is_explained_stage_by_stage(plan: Plan) -> None:
    run = plan(*of(8, 80), "--layout", "TP4 x PP2", "--context", 131_072)
    assert run.code == 0
    header = run.out.splitlines()[0].split("\t")
    assert header == ["Part", "Stage 1: layers 0-19, TP4 (GiB)", "Stage 2: layers 20-39, TP4 (GiB)"]
    assert "into 576, which Marlin pads to 640: 11 % more" in run.out
    assert "VLLM_PP_LAYER_PARTITION=20,20 vllm serve" in run.out
    assert "stage 2 decides" in run.out or "stage 1 decides" in run.out


def test_more_stages_than_stock_has_are_shown_as_equal_ones(plan: Plan) -> None:
    run = plan(*of(8, 80), "--layout", "pp7")
    assert "Refused\tWhy" in run.out and "5,6,6,6,6,6,5" in run.out and "vllm serve" not in run.out
    assert "it needs a vLLM that relays or replicates the caches" in run.out
    assert (
        "stages can begin at layers 8, 14, 20 only, so there are at most 4: a first stage of one or two"
        in run.out
    )
    assert "; the nearest is 8,6,6,20, in 4 stages, which does not fit 4 x 80 GiB" in run.out
    assert "; the nearest is 8,6,6,20, in 4 stages\n" in plan(*of(8, 200), "--layout", "pp7").out


def test_a_stage_without_a_group_needs_the_overlay(plan: Plan) -> None:
    run = plan(*of(8, 80), "--layout", "tp4pp2", "--partition", "20,20")
    assert "stage 2 owns no layer of the KV cache group of ring pages (layers 2, 8, 14)" in run.out
    assert "the overlay's op `pipeline` makes them start" in run.out
    assert "StopIteration" not in plan(*of(8, 80), "--layout", "tp4pp2", "--partition", "14,26").out


def test_the_published_layout_is_shown_though_stock_refuses_it(plan: Plan) -> None:
    run = plan(
        "--gpu-memory", 64, *PUBLISHED, "--gpu-memory-utilization", 0.95, "--max-num-batched-tokens", 2048
    )
    assert run.code == 0 and "vllm serve" not in run.out
    assert "needs a vLLM that relays or replicates the caches of layer 20" in run.out
    assert "; the nearest is 14,6,20, which does not fit 6 x 64 GiB" in run.out
    assert "published layout of six GPUs" in run.out and "planned with DSpark, 5 tokens a step" in run.out
    found = data(plan("--gpu-memory", 64, *PUBLISHED, "--json"))
    assert (found["gpus"], found["stock"], found["line"]) == (6, False, None)
    assert found["layout"]["stages"][2]["layers"] == [28, 39]


@pytest.mark.parametrize(
    ("words", "release", "short"),
    [
        (PUBLISHED, "0.33.0", "no stage can begin at layer 28: at 8, 14, 20 only"),
        (("--layout", "pp6"), "0.33.0", "it has 6 stages, and at most 4 start"),
        (("--layout", "tp4pp2", "--vllm", "0.32.0"), "0.32.0", "it runs no pipeline of this model"),
        (("--layout", "tp2+tp4", "--partition", "14,26"), "0.33.0", "its stages are of different TP"),
    ],
)
def test_what_vllm_refuses_says_so_first(
    plan: Plan, tmp_path: Path, words: tuple[str, ...], release: str, short: str
) -> None:
    run = plan("--gpu-memory", 80, *words)
    assert run.code == 0 and run.out.splitlines()[0] == f"refused by vLLM {release}: {short}"
    assert "the overlay's op `pipeline` makes them start" not in run.out and "vllm serve" not in run.out
    found = data(plan("--gpu-memory", 80, *words, "--json"))
    assert found["layout"]["refused"] == [short] and found["layout"]["status"] == "refused"
    assert found["line"] is None and found["refused"][0]["reason"]
    pytest.importorskip("matplotlib")
    plan("--gpu-memory", 80, *words, "--chart", tmp_path / "plan.svg")
    assert f"refused by vLLM {release}: {short}" in (tmp_path / "plan.svg").read_text()


def test_what_vllm_runs_is_not_refused(plan: Plan) -> None:
    for words in ((), ("--layout", "tp8"), ("--layout", "tp4pp2")):
        assert "refused by" not in plan(*of(8, 80), *words).out
        assert data(plan(*of(8, 80), *words, "--json"))["layout"]["refused"] == []


def test_the_nearest_partition_is_one_that_fits(plan: Plan) -> None:
    run = plan(*of(8, 64), "--layout", "tp4pp2", "--partition", "9,31")
    assert "; the nearest that fits is 14,26" in run.out


def test_a_layout_that_does_not_fit_names_the_one_of_these_gpus_that_does(plan: Plan) -> None:
    for gpus, gib, name, other in ((8, 80, "TP4", "TP8"), (16, 40, "TP8", "TP8 x PP2 (20,20)")):
        run = plan(*of(gpus, gib), "--layout", name)
        assert run.code == 3
        assert (
            f"error[model-does-not-fit]: {name} does not fit {gpus} x {gib} GiB: {name} with expert"
            in run.err
        )
        assert f"\nhint: these GPUs, unchanged: {other}, context 1,048,576 (leave --layout out)\n" in run.err
        assert data(plan(*of(gpus, gib), "--layout", name, "--json"))["nearest"] == [
            f"these GPUs, unchanged: {other}, context 1,048,576 (leave --layout out)"
        ]
    both = plan(*of(8, 80), "--layout", "tp4pp2", "--partition", "8,32").err
    assert both == "" or "(leave --layout and --partition out)" in both
    host = plan(*of(8, 64), "--layout", "tp4", "--host-memory", 128).err
    assert (
        "hint: these GPUs in a host of 22" in host
        and " GiB: TP8, context 524,288 (leave --layout out)" in host
    )
    none = plan(*of(4, 64), "--layout", "tp4").err
    assert "TP4 does not fit 4 x 64 GiB" in none and "hint: the nearest: 8 GPUs of this size" in none


def test_stages_of_different_tp_are_shown_and_are_not_possible(plan: Plan) -> None:
    run = plan("--gpu-memory", 64, "--layout", "tp2+tp4", "--gpu-memory-utilization", 0.95)
    assert "TP2 (GiB)" in run.out and "TP4 (GiB)" in run.out
    assert "one --tensor-parallel-size for all stages" in run.out and "vllm serve" not in run.out


def test_six_stages_of_one_gpu_say_what_single_stream_decode_does(plan: Plan) -> None:
    run = plan(*of(6, 200), "--layout", "pp6")
    assert (
        "every token crosses 6 stages one after the other, and in single-stream decode one GPU works"
        in run.out
    )


@pytest.mark.parametrize(
    ("words", "code", "error", "hint"),
    [
        (of(1, 24), 3, "model-does-not-fit", "or 8 GPUs of 48 GB: TP8"),
        ((*of(8, 80), "--concurrency", 100, "--context", 1_048_576), 3, "model-does-not-fit", "these GPUs with --concurrency 20: TP4"),
        (of(8, 40), 3, "model-does-not-fit", "16 GPUs of this size: TP8 x PP2 (20,20)"),
        ((*of(16, 40), "--vllm", "0.32.0"), 3, "model-does-not-fit", "these GPUs with vLLM 0.33.0: TP8 x PP2 (20,20)"),
        ((*of(8, 80), "--layout", "tp3"), 2, "layout-impossible", "the nearest: --layout tp2 or --layout tp4"),
        ((*of(8, 80), "--layout", "tp3pp2"), 2, "layout-impossible", "--layout tp2pp2 or --layout tp4pp2"),
        ((*of(8, 80), "--layout", "tp5"), 2, "layout-impossible", "the nearest: --layout tp4"),
        ((*of(48, 80), "--layout", "pp41"), 2, "layout-impossible", "--layout pp4"),
        ((*of(48, 80), "--layout", "pp41", "--vllm", "0.32.0"), 2, "layout-impossible", "--layout pp1"),
        ((*of(8, 80), "--layout", "eight"), 2, "layout-impossible", "tp8"),
        ((*of(8, 80), "--layout", "pp99999999999"), 2, "layout-impossible", "tp8"),
        ((*of(4, 80), "--layout", "tp8"), 2, "layout-impossible", "--gpus 8"),
        ((*of(8, 80), "--context", 2_000_000), 2, "context-too-long", "--context 1048576"),
        ((*of(8, 80), "--layout", "tp4pp2", "--partition", "20,21"), 2, "partition-invalid", "--partition 20,20"),
        ((*of(8, 80), "--layout", "tp2pp3", "--partition", "20,20"), 2, "partition-invalid", "--partition 8,12,20"),
        ((*of(8, 80), "--layout", "pp5", "--partition", "20,20"), 2, "partition-invalid", "--partition 8,6,6,20, in 4 stages"),
        ((*of(8, 80), "--layout", "tp4pp2", "--partition", "0,40"), 2, "partition-invalid", "--partition 20,20"),
        ((*of(8, 80), "--layout", "tp4pp2", "--partition", "half"), 2, "partition-invalid", "--partition 20,20"),
        ((*of(8, 80), "--partition", "20,20"), 2, "usage", "--layout tp4pp2"),
        ((*of(8, 80), "--vllm", "0.29.0"), 2, "usage", "--vllm 0.30.0"),
        ((*of(8, 80), "--gpu-memory-utilization", 1.5), 2, "usage", "0.92"),
        ((*of(8, 80), "--max-num-batched-tokens", 128), 2, "usage", "--max-num-seqs 128"),
        (of(8, 81_920), 2, "usage", "in GiB: 80?"),
        (of(8, 1_024.5), 2, "usage", "in GiB, such as --gpu-memory 80"),
        (of(8, "1e30"), 2, "usage", "in GiB, such as --gpu-memory 80"),
        ((*of(8, 80), "--speculative-tokens", 1_000_000_000), 2, "usage", "--speculative-tokens 5"),
        ((*of(8, 80), "--concurrency", "1e12"), 2, "usage", "--concurrency 256"),
        ((*of(8, 80), "--concurrency", 17, "--max-num-seqs", 16), 2, "usage", "--concurrency 16"),
        ((*of(8, 80), "--block-size", 100), 2, "usage", "--block-size 128"),
        ((*of(8, 80), "--chart", "plan.pdf"), 2, "usage", "--chart plan.png"),
        (("--gpus", 8), 3, "gpu-not-found", "--gpus 8 --gpu-memory 80"),
    ],
)  # fmt: skip
def test_what_is_impossible_says_so_and_what_is_nearest(
    plan: Plan, words: tuple[object, ...], code: int, error: str, hint: str
) -> None:
    run = plan(*words)
    assert run.code == code
    assert f"error[{error}]: " in run.err
    assert any(line.startswith("hint: ") and hint in line for line in run.err.splitlines()), run.err


def test_stages_are_recommended_where_one_does_not_hold_it(plan: Plan) -> None:
    run = plan(*of(16, 40))
    assert run.code == 0 and run.out.splitlines()[1].startswith("TP8 x PP2 (20,20)\tserves\t16\t")
    assert run.out.splitlines()[-1].startswith("VLLM_PP_LAYER_PARTITION=20,20 vllm serve ")
    assert "two stages of one GPU each, a small model, vLLM 0.33 with the overlay" in run.out
    assert plan(*of(16, 24), "--max-num-batched-tokens", 2_048).code == 0
    many = data(plan(*of(8, 80), "--context", 1_048_576, "--concurrency", 13, "--json"))
    assert many["layout"]["name"] == "TP4 x PP2 (20,20)" and many["line"]


def test_stages_that_are_asked_for_get_a_line_without_dspark(plan: Plan) -> None:
    run = plan(*of(8, 80), "--layout", "tp4pp2", "--speculative-tokens", 5)
    assert run.code == 0
    *_, note, line = run.out.splitlines()
    assert line.startswith("VLLM_PP_LAYER_PARTITION=20,20 vllm serve ") and "dspark" not in line
    assert note.startswith("note: the 5 tokens of DSpark are left out")
    assert "DSpark are left out" not in plan(*of(8, 80), "--layout", "tp8").out


def test_a_first_stage_without_a_kv_source_is_refused_by_name(plan: Plan) -> None:
    run = plan(*of(8, 80), "--layout", "tp4pp2", "--partition", "2,38")
    assert "vllm serve" not in run.out and "; the nearest is 8,32" in run.out
    assert (
        "the cut before layer 2 makes a first stage without a KV source: vLLM 0.30 to 0.33 asserts" in run.out
    )
    assert "PP5" not in plan(*of(8, 80)).out


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (("tp8",), ["stock", "overlay"]),
        (("tp4pp2", "--partition", "14,26"), ["stock", "overlay"]),
        (("tp4pp2", "--partition", "20,20"), ["overlay"]),
        (("tp4pp2", "--partition", "14,26", "--vllm", "0.32.0"), []),
        (("tp2pp3", "--partition", "14,14,12"), []),
    ],
)
def test_which_vllm_starts_a_layout(plan: Plan, words: tuple[object, ...], starts: list[str]) -> None:
    found = data(plan(*of(8, 80), "--layout", *words, "--json"))
    for part in (found, found["layout"]):
        assert (part["starts_on"], part["stock"]) == (starts, "stock" in starts)


def test_what_is_nearest_is_called_legal_and_no_more(plan: Plan) -> None:
    err = plan(*of(8, 80), "--layout", "tp4pp2", "--partition", "20,21").err
    assert "hint: the nearest legal one is --partition 20,20" in err and "stock builds" not in err


def test_the_nearest_can_be_planned_and_is_not_called_sure(plan: Plan) -> None:
    *_, tight = data(plan(*of(8, 40), "--json"))["nearest"]
    assert tight.startswith("these GPUs with --gpu-memory-utilization 0.97 ")
    assert tight.endswith(", within what is uncertain of this estimate")
    words = shlex.split(tight.partition("these GPUs with ")[2].partition(": ")[0])
    run = plan(*of(8, 40), *words)
    assert run.code == 0 and "vllm serve" in run.out and '{"image": 0}' in run.out
    assert run.out.splitlines()[1].split("\t")[1] == "serves, within what is uncertain of this estimate"
    *_, left, share, _ = run.out.splitlines()
    assert left.startswith("note: 0.") and "less than what is uncertain of this estimate: 1.29 GiB" in left
    (known,) = settings.share_findings(0.97)
    assert share == f"note: {known.name}: {known.text}; {known.hint}"
    sure = plan(*of(8, 80)).out
    assert "uncertain" not in sure and "ran out of memory" not in sure
    full = plan(*of(8, 80), "--gpu-memory-utilization", 0.97).out
    assert full.splitlines()[1].startswith("TP8\tserves\t") and share in full


def test_a_longer_context_than_the_best_ones_is_named(plan: Plan) -> None:
    run = plan(*of(16, 48))
    assert run.code == 0 and run.out.splitlines()[1].startswith(
        "TP8 with expert parallelism\tserves, within "
    )
    assert "\nnote: with --context 1048576: TP8 x PP2 (20,20)\n" in run.out
    asked = data(plan(*of(16, 48), "--context", 1_048_576, "--json"))
    assert (asked["layout"]["name"], asked["longer"]) == ("TP8 x PP2 (20,20)", None)
    assert "with --context" not in plan(*of(8, 80)).out
    assert "with --context" not in plan(*of(16, 48), "--layout", "tp8").out


def test_the_document_has_the_load_of_the_line_and_the_one_asked_for(plan: Plan) -> None:
    found = data(plan(*of(8, 80), "--json"))
    assert (found["load"]["sequences"], found["asked"]["sequences"]) == (80, 256)
    assert (found["load"]["context"], found["asked"]["context"]) == (1_048_576, None)
    short = data(plan(*of(8, 80), "--context", 4_096, "--json"))
    assert (short["load"]["context"], short["asked"]["context"]) == (4_096, 4_096)
    assert "--max-num-seqs 80 " in found["line"]
    staged = data(plan(*of(16, 40), "--json"))
    assert (staged["load"]["speculative"], staged["asked"]["speculative"]) == (0, 5)


def test_layouts_that_do_not_fit_are_a_line_and_with_v_rows(plan: Plan) -> None:
    run = plan(*of(8, 80))
    lines = run.out.splitlines()
    headers = lines[0].split("\t")
    assert headers[:3] == ["Layout", "Status", "GPUs"] and "Note" not in headers
    # a terminal of 80 characters has room for the columns
    assert 12 * len(headers) <= 80
    rows = lines[1 : lines.index("10 other layouts of these GPUs do not fit: -v shows them, with notes")]
    assert [row.split("\t")[0] for row in rows][:2] == ["TP8", "TP8 with expert parallelism"]
    assert not any("does not fit" in row for row in rows)
    more = plan(*of(8, 80), "-v").out.splitlines()
    assert len([row for row in more if "\tdoes not fit\t" in row]) == 10 and more[0].endswith("\tNote")
    none = plan(*of(8, 24)).out.splitlines()
    assert none[1].startswith("TP4 x PP2 (20,20) with expert parallelism\tdoes not fit\t8\t41.1 of 21.8\t-")
    assert "other layouts of these GPUs do not fit" in none[2]


def test_options_change_the_line_and_the_numbers(plan: Plan) -> None:
    base = data(plan(*of(8, 80), "--json"))
    for words, part in (
        (("--no-vision",), "--limit-mm-per-prompt '{\"image\": 0}'"),
        (("--engram", "gpu", "--gpu-memory", 200), '{"cpu_offload": false}'),
        (("--speculative-tokens", 3), '"num_speculative_tokens": 3'),
        (("--max-num-batched-tokens", 4096), "--max-num-batched-tokens 4096"),
        (("--max-num-seqs", 64), "--max-num-seqs 64"),
        (("--gpu-memory-utilization", 0.9), "--gpu-memory-utilization 0.9"),
        (("--context", 262_144), "--max-model-len 262144"),
        (("--expert-parallel",), "--enable-expert-parallel"),
        (("--host-memory", 256), '"use_thp": true'),
    ):
        found = data(plan(*of(8, 80), *words, "--json"))
        assert part in found["line"], words
        assert found["layout"] != base["layout"] or words[0] in ("--host-memory", "--speculative-tokens"), (
            words
        )
    assert data(plan(*of(8, 80), "--speculative-tokens", 0, "--json"))["layout"]["speculative_tokens"] == 0


def test_a_release_before_033_refuses_stages_and_still_shows_their_numbers(plan: Plan) -> None:
    run = plan(*of(8, 80), "--vllm", "0.32.0")
    assert "PP2 and more\tvLLM 0.32.0 runs no pipeline" in run.out and " x PP" not in run.out
    one = plan(*of(8, 80), "--vllm", "0.32.0", "--layout", "tp4pp2")
    assert one.code == 0 and "vllm serve" not in one.out
    assert "TP4 x PP2 (20,20)\tvLLM 0.32.0 runs no pipeline of this model" in one.out
    assert '"ValueError: DeepSeek V4 vision MoE routing requires input_ids."' in one.out
    found = data(plan(*of(8, 80), "--vllm", "0.32.0", "--layout", "tp4pp2", "--json"))
    assert found["layout"]["pool"]["tokens"] > 0 and found["layout"]["note"].endswith("not with vLLM 0.32.0")
    assert "x PP" in plan(*of(8, 80), "--vllm", "0.33.0").out


def test_a_release_that_the_target_is_not(plan: Plan, fake: FakeVllm) -> None:
    other = "0.32.0" if fake.version != "0.32.0" else "0.33.0"
    run = plan(*of(8, 80), "--target", fake.site, "--vllm", other)
    assert (run.code, run.out) == (2, "") and f"error[usage]: --vllm {other}, and the vLLM in " in run.err
    assert "hint: one of the two" in run.err
    assert plan(*of(8, 80), "--target", fake.site, "--vllm", fake.version).code == 0


def test_a_block_size_that_sm8x_has_not_is_shown_without_a_line(plan: Plan) -> None:
    run = plan(*of(8, 80), "--block-size", 64)
    assert run.code == 0 and "vllm serve" not in run.out and "blocks of 64" in run.out


def test_a_host_that_is_too_small_puts_engram_on_the_gpus(plan: Plan) -> None:
    run = plan(*of(8, 80), "--host-memory", 128)
    assert run.code == 0 and "note: the host has 128 GiB, too few for Engram's tables" in run.out
    assert '"cpu_offload": false' in run.out.splitlines()[-1] and "Host memory: " not in run.out
    found = data(plan(*of(8, 80), "--host-memory", 128, "--json"))
    asked = data(plan(*of(8, 80), "--engram", "gpu", "--json"))
    assert (found["line"], found["layout"]) == (asked["line"], asked["layout"])
    one = data(plan(*of(8, 80), "--layout", "tp8", "--expert-parallel", "--host-memory", 128, "--json"))
    assert '"cpu_offload": false' in one["line"]
    assert '"cpu_offload": true' in plan(*of(8, 80), "--host-memory", 240).out.splitlines()[-1]


def test_a_host_that_is_too_small_for_cards_that_are_too_small(plan: Plan) -> None:
    for words in ((), ("--layout", "tp8")):
        run = plan(*of(8, 64), "--host-memory", 128, *words)
        assert run.code == 3 and "vllm serve" not in run.out
        assert "error[host-memory-too-small]: the host has 128 GiB, and TP8 pins 19" in run.err
        assert "hint: a host of 22" in run.err and "; or with --engram gpu " in run.err
    ids = plan(*of(8, 80), "--host-memory", 2, "--engram", "gpu")
    assert ids.code == 3 and "TP8 with expert parallelism pins 4 for token ids" in ids.err
    states = {one["status"] for one in data(plan(*of(8, 64), "--host-memory", 128, "--json"))["layouts"]}
    assert "host memory too small" in states and "serves" not in states


def test_the_line_has_no_more_sequences_than_its_logits_are_counted_for(plan: Plan) -> None:
    for context, most in ((1_048_576, 80), (524_288, 160), (262_144, 256)):
        found = data(plan(*of(8, 80), "--context", context, "--json"))
        options = parse_options(shlex.split(found["line"]))
        assert int(options.get("max-num-seqs", 256)) == found["layout"]["sequences"] == most
        each = 6 * context * 4 / 2**30
        counted = found["layout"]["stages"][0]["parts_gib"]["activations"]
        assert most * each <= counted and (most == 256 or (most + 1) * each > counted)
        assert any("lowered to" in note for note in found["notes"]) is (most < 256)
        assert any(f"--max-num-seqs {most}" in why for why in found["reasons"]) is (most < 256)
    # fewer are kept, and more than vLLM's own are lowered too
    assert data(plan(*of(8, 80), "--max-num-seqs", 16, "--json"))["layout"]["sequences"] == 16
    assert data(plan(*of(8, 80), "--max-num-seqs", 4_096, "--json"))["layout"]["sequences"] == 80


def test_more_requests_than_sequences_are_not_served(plan: Plan) -> None:
    found = data(plan(*of(8, 1_024), "--context", 1_048_576, "--concurrency", 100, "--json"))
    states = {one["name"]: one["status"] for one in found["layouts"]}
    assert states["TP8"] == "too few sequences" and states["TP1"] == "serves"
    run = plan(*of(8, 1_024), "--layout", "tp8", "--context", 1_048_576, "--concurrency", 100)
    assert run.code == 3 and "has the logits of 80 sequences; 100 are asked for" in run.err


@pytest.mark.parametrize("size", [(8, 40), (4, 80), (8, 80), (8, 48), (16, 40)])
def test_plan_and_doctor_choose_the_same(plan: Plan, size: tuple[int, int]) -> None:
    found, advice = data(plan(*of(*size), "--json")), advise(*size)
    assert found["line"] == advice.line and found.get("nearest", []) == list(advice.nearest)
    # the sum that says why
    assert found["reasons"][0].partition(";")[0] in " ".join(advice.reasons)


def test_a_chart_is_drawn_and_is_the_same_every_time(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        one, two = (tmp_path / f"{name}.{suffix}" for name in "ab")
        for path in (one, two):
            assert plan(*of(8, 80), "--chart", path).code == 0
        assert one.read_bytes().startswith(start) and one.read_bytes() == two.read_bytes()
    text = (tmp_path / "a.svg").read_text()
    assert (
        "TP4 x PP2 (20,20), stage 2" in text
        and "KV pool, million tokens" in text
        and "planned, not measured" in text
    )


@pytest.mark.parametrize("size", [(8, 80), (16, 48), (8, 24)])
def test_labels_of_a_chart_are_in_its_frame_and_ticks_apart(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    plan(*of(*size), "--chart", tmp_path / "plan.png")
    monkeypatch.undo()
    # the file has another resolution
    drawn[0].canvas.draw()
    pools = drawn[0].axes[1]
    frame = pools.get_window_extent()
    assert pools.texts and all(text.get_window_extent().x1 <= frame.x1 for text in pools.texts)
    ticks = [tick.label1.get_window_extent() for tick in pools.xaxis.get_major_ticks()]
    assert all(before.x1 < after.x0 for before, after in pairwise(ticks))
    pyplot.close(drawn[0])


def test_without_matplotlib_nothing_is_planned(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = plan(*of(8, 80), "--chart", tmp_path / "plan.png")
    assert (run.code, run.out) == (3, "")
    assert "error[matplotlib-missing]" in run.err and "pip install 'deepinfer[bench]'" in run.err
    with pytest.raises(Exception, match="matplotlib"):
        chart.check(tmp_path / "plan.svg")


def test_the_document_of_a_plan_that_fails(plan: Plan) -> None:
    document = plan(*of(8, 24), "--json").document
    assert (document["status"], document["exit_code"]) == ("partial", 3)
    assert document["errors"][0]["code"] == "model-does-not-fit" and document["data"]["nearest"]
    assert document["data"]["line"] is None and document["data"]["layouts"]


def test_what_is_not_given_is_what_the_planner_takes():
    # the command line has its own copies: importing the planner would slow every command's start
    given = {name: one.default for name, one in inspect.signature(cli_plan.plan).parameters.items()}
    load = Load()
    assert (given["concurrency"], given["speculative_tokens"]) == (load.concurrency, load.speculative)
    assert given["max_num_batched_tokens"] == load.batched_tokens
    assert given["max_num_seqs"] == load.sequences
    assert given["gpu_memory_utilization"] == load.utilization
    assert (given["vision"], given["block_size"]) == (load.vision, load.block_size)
    assert (given["engram"] == "gpu") == load.engram_on_gpu


def test_the_stage_that_decides_is_the_one_of_the_error(plan: Plan) -> None:
    run = plan(*of(8, 48), "--layout", "tp2pp3")
    assert run.code == 3 and "stage 3 of TP2 x PP3" in run.err and "; stage 3 decides" in run.out


def test_the_memory_of_the_host_is_a_sentence_of_its_own(plan: Plan) -> None:
    run = plan(*of(8, 80), "--host-memory", 512)
    assert " with huge pages. The host has 512.\n" in run.out


def test_hints_for_a_small_host_keep_the_kind_of_experts(plan: Plan) -> None:
    run = plan(*of(8, 80), "--host-memory", 100, "--no-expert-parallel")
    assert run.code == 3 and "error[host-memory-too-small]" in run.err
    bought = [
        one for one in run.err.split("; or ") if "with --engram gpu" in one and "without --no-" not in one
    ]
    assert bought and not any("expert parallelism" in one for one in bought)
