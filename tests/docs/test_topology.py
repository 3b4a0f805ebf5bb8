"""docs/05 states what `deepinfer plan` computes: its tables to the letter, its sentences by what they claim."""

from __future__ import annotations

import json
import re
from typing import Any

from deepinfer_cli.planner import weights
from deepinfer_cli.planner.shape import FLASH
from deepinfer_cli.serve import memory
from scripts import make_topology as script
from tests.docs.markdown import read

NAME = "docs/05_TOPOLOGY_1M_CONTEXT_ANALYSIS_SM80.md"
TEXT = read(NAME)


def layout(options: str) -> dict[str, Any]:
    return script.plan(f"deepinfer plan {options}")[1]["layout"]  # type: ignore[no-any-return]


def test_the_tables_are_what_the_commands_print() -> None:
    assert set(script.SECTIONS) == set(re.findall(r"plan:begin (\w+)", TEXT))
    assert script.render(TEXT) == TEXT, "python scripts/make_topology.py"


def test_an_old_figure_is_found() -> None:
    old = re.sub(r"\d\.\d M", "0.5 M", TEXT)
    assert old != TEXT and script.render(old) == TEXT


def test_six_cards_fail_at_the_last_stage_and_the_published_cut_does_not() -> None:
    six = "--gpus 6 --gpu-memory 80 --layout tp2pp3 --partition"
    stock = layout(f"{six} 14,6,20")
    assert stock["stages"][-1]["sum_gib"] > stock["usable_gib"] > stock["stages"][0]["sum_gib"]
    assert stock["starts_on"] == ["overlay"] and not layout(f"{six} 14,14,12")["starts_on"]
    assert not layout("--gpus 6 --gpu-memory 80 --layout tp2+tp4")["starts_on"]


def test_one_stage_is_preferred_to_a_larger_pool_without_a_drafter() -> None:
    best = layout("--gpus 8 --gpu-memory 80")
    stages = layout("--gpus 8 --gpu-memory 80 --layout tp4pp2 --no-expert-parallel")
    assert best["name"] == "TP8" and best["speculative_tokens"] and not stages["speculative_tokens"]
    assert stages["pool"]["tokens"] > 2 * best["pool"]["tokens"]


def test_padding_and_the_hosts_tables() -> None:
    for tp, width, more in ((4, 640, 11), (8, 384, 33)):
        padding = weights.expert_padding(FLASH, weights.Split(tp))
        assert round(FLASH.expert_width / tp * padding) == width and f"{width}" in TEXT
        assert f"{(padding - 1) * 100:.0f} %" == f"{more} %" and f"{more} %" in TEXT
    host = script.plan("deepinfer plan --gpus 8 --gpu-memory 80")[1]["host"]
    assert f"{host['engram_gib']:.1f} GiB" in TEXT and f"{host['engram_rounded_gib']:.0f} GiB" in TEXT


def test_the_plan_is_near_what_was_published_or_the_difference_is_explained_by_name() -> None:
    section = TEXT.partition("## What was published")[2]
    near = {row.name: script.ratio(row, published) for row, _, published in script.PUBLISHED}
    known = {
        "PP6 (7,7,7,7,7,5)": ("**PP6** (7,7,7,7,7,5)", 0.97),
        "TP2 + TP4 (14,26), whole experts": ("**TP2 + TP4** (14,26)", 0.98),
    }
    assert {name for name, ratio in near.items() if abs(ratio - 1) > 0.1} == known.keys()
    for row, _, published in script.PUBLISHED:
        if row.name in known:
            named, share = known[row.name]
            assert f"- {named}, {100 - 100 * near[row.name]:.0f} % less. " in section
            assert (
                abs(script.ratio(row, published, share) - 1) < 0.1
                and f"With {share} it is within 10 %" in section
            )
    pp6 = script.PUBLISHED[1][0].command(script.SHOWN) + " --no-vision"
    assert abs(script.plan(pp6)[1]["layout"]["pool"]["tokens"] / script.PUBLISHED[1][2] - 1) < 0.1


def test_what_cuda_sees_of_the_columns_cards() -> None:
    sizes = [f"{memory.cuda_sees(card):.2f}" for card in script.CARDS]
    assert f"{', '.join(sizes[:-1])} and {sizes[-1]} GiB" in TEXT.replace("\n", " ")
    narrow = script.plan("deepinfer plan --gpus 8 --gpu-memory 48")[1]["layout"]
    assert f"{narrow['pool']['contexts']:.2f} contexts of {narrow['context']:,}" in TEXT
    less = "deepinfer plan --gpus 8 --layout tp8 --expert-parallel --context 262144 --gpu-memory"
    assert [script.plan(f"{less} {card}")[0] for card in (48, 47.88)] == [0, 3]
    small = script.plan("deepinfer plan --gpus 8 --gpu-memory 45 --max-num-batched-tokens 2048")
    assert small[0] == 0 and f"and a context of {small[1]['layout']['context']:,}" in TEXT


def test_what_was_run_of_pipelines_is_in_the_files_and_said_in_the_same_words_twice() -> None:
    said = re.search(r"^\*\*What was run of pipelines\*\*.*?no Ampere card\.", TEXT, re.DOTALL | re.MULTILINE)
    assert said and said[0] in read("docs/doctor.md")
    planned = {
        row["name"]: row for row in json.loads(read("benchmarks/results/checks/plan_2026-11-30.json"))["rows"]
    }
    for name, cut in {"pp2": [4, 4], "pp2-uneven": [6, 2], "pp2-depth-40": [20, 20]}.items():
        assert (
            planned[name]["partition"] == cut
            and planned[name]["capability"] == [8, 0]
            and f"`{name}`" in said[0]
        )
    runs = json.loads(read("benchmarks/results/checks/e2e_2026-11-30.json"))["runs"]
    for name in ("pp2-sm80", "pp2-graphs"):
        assert runs[name]["ok"] and "four and four layers" in runs[name]["what"] and f"`{name}`" in said[0]
    assert "Workers disagree on supported KV cache layouts" in runs["pp2-two-layers"]["refused"]
    stock = planned["pp2-stock"]
    assert (
        stock["partition"] == [4, 4]
        and "Worker failed" in stock["refused"]
        and "StopIteration" not in str(stock)
    )


def test_the_run_on_a_gpu_is_as_large_as_is_said() -> None:
    run = json.loads(read("benchmarks/results/checks/plan_2026-11-30.json"))
    pools = [row for row in run["rows"] if row["do"] == "pool" and row["vllm"]]
    single = [row for row in pools if row["gpus"] == 1]
    assert f"{len(single)} configurations" in TEXT and "TP2 and three pipelines on two" in TEXT
    assert {row["name"] for row in pools if row["gpus"] > 1} == {"tp2", "pp2", "pp2-uneven", "pp2-depth-40"}


def test_which_stages_stock_starts() -> None:
    runs = {row.name: script.needs(row) for row in script.ROWS}
    assert runs["TP8"] == runs["TP4 x PP2 (14,26)"] == "stock, the overlay"
    assert runs["TP4 x PP2 (20,20)"] == runs["TP2 x PP3 (14,6,20)"] == "the overlay"
    assert runs["TP2 x PP3 (14,14,12)"] == runs["TP2 + TP4 (14,26)"] == "**neither**"
