"""What a run asks of its child, and what it is held against."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_cli.overlay import payload
from deepinfer_cli.validate.e2e import model, plan

GIB = 1 << 30
GROUPS = {"gather": "accelerate", "sparse_decode": "accelerate", "yoco": "accelerate", "engram": "enable"}
BASE = plan.Run("", plan.CONFIGURATIONS["eager"], memory_bytes=24 * GIB)


@pytest.mark.parametrize("name", plan.CONFIGURATIONS)
def test_every_configuration_starts_in_24_gb(name):
    run = plan.Run(name, plan.CONFIGURATIONS[name], memory_bytes=24 * 10**9)
    share = run.utilization()
    assert share < 0.9
    assert share * run.memory_bytes > model.weight_bytes(run.configuration.model) + 5 * GIB


@pytest.mark.parametrize("name", plan.CONFIGURATIONS)
def test_a_request_is_json_and_fits_its_own_limits(name, tmp_path):
    run = plan.Run(name, plan.CONFIGURATIONS[name], parent=tmp_path, arch="sm80", generate=True)
    request = json.loads(json.dumps(run.request(tmp_path / "out")))
    assert request["capability"] == [8, 0]
    engine = request["engine"]
    assert engine["max_model_len"] <= request["model"]["positions"]
    lengths = [0]
    for phase in request["phases"]:
        lengths += [length + phase["tokens"] for length in phase.get("lengths", [])]
        lengths += [phase.get("length", 0), phase.get("prefill", 0), phase.get("context", 0)]
        assert phase.get("chunk", 1) <= engine["max_num_batched_tokens"]
        assert phase["do"] in ("generate", "score", "prefix", "far", "time")
        if "of" in phase:
            assert phase["of"] in [one["name"] for one in request["phases"] if one["do"] == "generate"]
    assert max(lengths) <= engine["max_model_len"]
    names = [phase["name"] for phase in request["phases"]]
    assert len(set(names)) == len(names)


def test_prompts_lie_on_both_sides_of_every_edge():
    edges = set(plan.CONFIGURATIONS["eager"].phases[0]["lengths"])
    for edge in (model.WINDOW, model.TOP_K, 2 * model.TOP_K):
        assert {edge - 1, edge} <= edges
        assert any(edge < length <= edge + 2 for length in edges)
    assert {7, 1_500, 3_000, 5_000} <= edges


def test_the_pipeline_is_cut_where_v41_allows_it():
    cut = int(plan.CONFIGURATIONS["pp2"].env["VLLM_PP_LAYER_PARTITION"].partition(",")[0])
    readers = [layer for layer, ratio in enumerate(model.RATIOS) if ratio and layer >= cut]
    sources = {max(source for source in model.KV_SOURCES if source <= layer) for layer in readers}
    assert min(sources) >= cut


def test_only_the_variables_of_this_run_decide(monkeypatch):
    given = {
        "PATH": "/bin", "DEEPINFER_DISABLE": "1", "DEEPINFER_DISABLE_OPS": "gather",
        "TRITON_OVERRIDE_ARCH": "sm90", "TRITON_INTERPRET": "1", "PYTHONPATH": "/mine",
    }  # fmt: skip
    forced = replace(BASE, arch="sm86", generate=True, parent=Path("/site"), off=("yoco", "combine"))
    env = forced.environment(given)
    assert env["DEEPINFER_FORCE_ARCH"] == env["TRITON_OVERRIDE_ARCH"] == "sm86"
    assert env["DEEPINFER_DISABLE_OPS"] == "combine,yoco"
    assert env["PYTHONPATH"] == "/site:/mine"
    assert "DEEPINFER_DISABLE" not in env and "TRITON_INTERPRET" not in env
    own = replace(BASE, arch="sm80").environment(given)
    assert not [name for name in own if name.startswith(("DEEPINFER_", "TRITON_"))]
    stock = BASE.environment(given)
    assert stock["DEEPINFER_DISABLE"] == "1" and "DEEPINFER_FORCE_ARCH" not in stock
    by_card = replace(BASE, off_switch=False).environment(given)
    assert not [name for name in by_card if name.startswith(("DEEPINFER_", "TRITON_"))]
    assert env["PYTHONDONTWRITEBYTECODE"] == "1"
    assert "PYTHONDONTWRITEBYTECODE" not in replace(BASE, bytecode=True).environment(given)


def test_the_reference_is_stock_where_stock_runs():
    ((tested, other),) = plan.pairs(["graphs"], BASE, GROUPS, (9, 0), "sm80")
    assert (tested.arch, tested.generate) == ("sm80", True)
    assert (other.arch, other.generate, other.off) == (None, False, ())
    assert tested.configuration is other.configuration


def test_the_reference_of_a_pipeline_is_one_gpu_of_stock():
    """Stock vLLM 0.33.0 starts no pipeline of V4.1."""
    ((tested, other),) = plan.pairs(["pp2"], BASE, GROUPS, (9, 0), "sm80")
    assert tested.engine()["pipeline_parallel_size"] == 2 and tested.configuration.gpus == 2
    assert "pipeline_parallel_size" not in other.engine() and other.configuration.gpus == 1
    assert "VLLM_PP_LAYER_PARTITION" not in other.environment({})
    assert tested.configuration.phases == other.configuration.phases
    ((tested, other),) = plan.pairs(["pp2"], BASE, GROUPS, (8, 0), "sm80")
    assert tested.configuration is other.configuration


def test_the_reference_is_the_enable_group_on_ampere():
    ((tested, other),) = plan.pairs(["graphs"], BASE, GROUPS, (8, 0), "sm80")
    assert (tested.arch, tested.generate, tested.off) == ("sm80", False, ())
    assert (other.arch, other.generate, other.off) == ("sm80", False, ("yoco",))
    assert tested.name != other.name


def test_ops_to_switch_off_have_a_switch():
    groups = plan.groups_of(payload.bundled().root)
    assert "mhc_post_with_sqrsum" not in groups  # it serves other ops and replaces nothing
    off = plan.accelerating(groups)
    assert set(off) >= {"combine", "ragged", "sparse_prefill", "mhc_post"}
    assert not plan.NEEDED & set(off)
    assert groups.keys() >= plan.NEEDED
