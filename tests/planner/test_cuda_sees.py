"""vLLM takes its share of what CUDA says that a card has, and `--gpu-memory` and NVML say more."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_cli.commands import plan_request
from deepinfer_cli.detect import gpu
from deepinfer_cli.detect.gpu import GpuReport
from deepinfer_cli.planner import kv
from deepinfer_cli.planner.shape import FLASH
from deepinfer_cli.serve import memory
from deepinfer_cli.serve.memory import Layout, Load

RUN = Path(__file__).parents[2] / "benchmarks" / "results" / "checks" / "plan_2026-11-30.json"


@pytest.mark.parametrize(
    ("shown", "published"),
    [(80, (79.15,)), (40, (39.39, 39.56)), (48, (47.54,)), (24, (23.69,))],
)
def test_what_pytorch_says_of_such_cards(shown: float, published: tuple[float, ...]) -> None:
    """Out-of-memory messages that users have published: `GPU 0 has a total capacity of ...`."""
    assert all(memory.cuda_sees(shown) == pytest.approx(one, rel=0.006) for one in published)
    assert round(memory.cuda_sees(80), 2) == 79.15


def test_the_run_on_an_h200_had_no_less() -> None:
    # torch's total; nvidia-smi shows 143,771 MiB of such a card
    seen = json.loads(RUN.read_text(encoding="utf-8"))["environment"]["memory_bytes"] / memory.GIB
    assert memory.cuda_sees(143_771 / 1_024) < seen < 143_771 / 1_024


def test_the_share_is_one_of_what_cuda_sees() -> None:
    found = memory.estimate(Layout(8), 80, Load())
    assert (found.card, found.memory) == (80, memory.cuda_sees(80))
    assert found.usable == pytest.approx(0.92 * 79.15, abs=0.005)
    left = int((found.usable - found.stages[0].total) * memory.GIB)
    assert found.pool.blocks == kv.pool(FLASH, (40,), Load().traffic, [left]).blocks
    assert "GiB of 72.8 GiB (92 % of what CUDA sees, about 79.15 of 80 GiB)" in found.arithmetic


def nvml(total: int) -> Any:
    class NVMLError(Exception):
        pass

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetCount=lambda: 8,
        nvmlSystemGetCudaDriverVersion=lambda: 13000,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=total),
        nvmlDeviceGetCudaComputeCapability=lambda _: (8, 6),
        nvmlDeviceGetMigMode=lambda _: (0, 0),
        nvmlDeviceGetName=lambda _: "NVIDIA RTX A6000",
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
    )


def test_cards_that_nvml_names_are_planned_as_those_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    # ECC on: 46,068 MiB of 48 GiB
    report = gpu.read_nvml(nvml(46_068 * 2**20))
    monkeypatch.setattr(plan_request, "detect_gpus", lambda: report)
    here = plan_request.machine_of(plan_request.PlanOptions(), None)
    monkeypatch.setattr(plan_request, "detect_gpus", lambda: GpuReport())
    given = plan_request.machine_of(plan_request.PlanOptions(gpus=8, memory=46_068 / 1_024), None)
    assert (here.gpus, here.gib) == (given.gpus, given.gib) == (8, 46_068 / 1_024)
    assert memory.estimate(Layout(8), here.gib, Load()).memory == memory.cuda_sees(46_068 / 1_024)
