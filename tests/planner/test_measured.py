"""What an H200 has shown (`scripts/gpu_plan_check.py`, benchmarks/results/checks/plan_2026-11-30.json), planned anew."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.planner import buffers, kv, shape, weights
from deepinfer_cli.planner.weights import Split

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "results" / "checks" / "plan_2026-11-30.json"
DATA = json.loads(FILE.read_text(encoding="utf-8"))
ROWS = {row["name"]: row for row in DATA["rows"] if row["vllm"]}
GIB = 2**30


@pytest.fixture
def known(monkeypatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return {row.name: row for row in importlib.import_module("gpu_plan_check").ROWS}


def test_enough_was_measured() -> None:
    pools = [row for row in ROWS.values() if row["do"] == "pool" and row["gpus"] == 1]
    assert len(pools) >= 8 and {"tp2", "pp2", "pp2-uneven", "pp2-depth-40"} <= ROWS.keys()
    assert DATA["environment"]["gpu"] == "NVIDIA H200" and DATA["environment"]["vllm"] == "0.33.0"


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_pool_is_what_vllm_reported(name: str, known) -> None:
    row, config = ROWS[name], known[name].config()
    small = shape.from_config(config)
    partition = tuple(row["partition"]) or (small.layers,)
    available = [
        min(one["available"] for one in row["workers"] if one["stage"] == stage)
        for stage in range(len(partition))
    ]
    found = kv.pool(small, partition, known[name].traffic(), available)
    assert found.tokens == pytest.approx(row["vllm"]["tokens"], rel=0.02 if row["gpus"] > 1 else 0.01)
    # and in fact to the block
    assert (found.blocks, found.tokens) == (row["vllm"]["blocks"], row["vllm"]["tokens"])


@pytest.mark.parametrize("name", ["profile-sm80", "profile-262144-sm80", "tp2", "dspark"])
def test_weights_by_part(name: str, known) -> None:
    small, row = shape.from_config(known[name].config()), ROWS[name]
    tp, draft = row["engine"].get("tensor_parallel_size", 1), name == "dspark"
    found = weights.stage(small, range(8), Split(tp, vision=False, draft=draft), first=True, last=True)
    seen = row["workers"][0]["parts"]
    # the script tells parts apart by the tensors' names: `hc_attn_fn` is attention's there
    mixing = 8 * small.streams * 24 * small.hidden * 4
    assert found["experts"] == pytest.approx(seen["experts"], rel=0.001)
    assert found["shared experts"] == pytest.approx(seen["shared experts"], rel=0.001)
    assert found["embedding and head"] == pytest.approx(seen["embedding"] + seen["head"], rel=0.001)
    assert found["attention"] + mixing == pytest.approx(
        seen["attention"] + seen["indexer"] + seen["compressor"], rel=0.005
    )
    if draft:
        assert found["DSpark"] == pytest.approx(seen["dspark"], rel=0.01)


@pytest.mark.parametrize(
    "name", ["profile", "profile-sm80", "profile-262144", "profile-262144-sm80", "measure"]
)
def test_what_a_dummy_pass_takes_and_keeps(name: str, known) -> None:
    small, (worker,) = shape.from_config(known[name].config()), ROWS[name]["workers"]
    traffic = known[name].traffic()
    kept = buffers.workspace(small, range(8), traffic, "0.33.0")
    assert kept / GIB == pytest.approx(worker["kept_over_weights"] / GIB, abs=0.05)
    taken = buffers.activations(small, traffic, buffers.Served(sequences=16))
    assert taken == pytest.approx(worker["peak_over_weights"] - worker["kept_over_weights"], rel=0.01)


def test_all_of_it_against_what_vllm_consumed(known) -> None:
    """vLLM's own profiling: what it consumed, and the peak that it added."""
    small, (worker,) = shape.from_config(known["measure"].config()), ROWS["measure"]["workers"]
    found = weights.stage(small, range(8), Split(vision=False), first=True, last=True)
    found |= buffers.stage(small, range(8), known["measure"].traffic(), buffers.Served(sequences=16))
    # no graphs were captured
    held = sum(found.values()) - buffers.GRAPHS
    assert held == pytest.approx(worker["total_consumed"] + worker["peak_activation_memory"], rel=0.01)
    assert (
        worker["requested_memory"] - worker["total_consumed"] - worker["peak_activation_memory"]
        == worker["available"]
    )
