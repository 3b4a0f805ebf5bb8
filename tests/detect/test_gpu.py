"""GPU detection from recorded driver answers, and the decision what to install for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_cli.detect import gpu as gpu_module
from deepinfer_cli.detect.arch import resolve_archs
from deepinfer_cli.detect.gpu import Gpu, GpuReport, detect_gpus, parse_smi, read_nvml
from deepinfer_cli.errors import UnsupportedError, UsageError

A100 = "0, NVIDIA A100-SXM4-80GB, GPU-6ddc8f3e-0b5a-2c57-8a45-2f37ac3a6d02, 8.0, 81920, 580.65.06, Disabled\n"
A30 = "0, NVIDIA A30, GPU-2a1f0c53-95a4-64ac-1ad3-3b1b90e4d1e0, 8.0, 24576, 570.133.20, Disabled\n"
RTX3090 = (
    "1, NVIDIA GeForce RTX 3090, GPU-9a1c8a2c-6d55-7d1a-b7b6-7a4a4f5f5e11, 8.6, 24576, 580.65.06, [N/A]\n"
)
RTX4090 = (
    "2, NVIDIA GeForce RTX 4090, GPU-4dfb5d3c-2f63-8c85-9d4e-51e6b0d9c9d3, 8.9, 24564, 580.65.06, [N/A]\n"
)
H100 = "3, NVIDIA H100 80GB HBM3, GPU-0f2a5cf0-78d7-61b1-a4f3-0be4f4a1c6aa, 9.0, 81559, 580.65.06, Disabled\n"
MIG_ON = (
    "0, NVIDIA A100-PCIE-40GB, GPU-7f3d9a44-3bd4-5b0f-a0ce-11d9b8f9b4c1, 8.0, 40960, 580.65.06, Enabled\n"
)
OLD_DRIVER = 'Field "compute_cap" is not a valid field to query.\n\n'
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.65\n"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)


def card(index: int, name: str, capability: tuple[int, int] | None) -> Gpu:
    return Gpu(index, name, f"GPU-{index}", capability, 80 * 2**30)


class FakeNvml:
    """pynvml with recorded answers; an exception as answer is raised."""

    class NVMLError(Exception):
        def __init__(self, value: int, text: str) -> None:
            super().__init__(text)
            self.value = value

    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_NOT_FOUND = 6

    def __init__(self, cards: list[dict[str, Any]], init: Exception | None = None) -> None:
        self.cards = cards
        self.init = init

    def nvmlInit(self) -> None:
        if self.init:
            raise self.init

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        lost = self.cards[index].get("lost")
        if lost:
            raise lost
        return self.cards[index]

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> str:
        return str(handle["name"])

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> str:
        return "GPU-1"

    def nvmlDeviceGetCudaComputeCapability(self, handle: dict[str, Any]) -> tuple[int, int]:
        return handle["capability"]  # type: ignore[no-any-return]

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(total=handle.get("memory", 85899345920))

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> list[int]:
        if "mig" not in handle:
            raise self.NVMLError(3, "Not Supported")
        return [handle["mig"], handle["mig"]]


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    library_missing = FakeNvml.NVMLError(12, "NVML Shared Library Not Found")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], library_missing))


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch, no_nvml: None) -> Any:
    """Sets what `nvidia-smi` answers, one (stdout, returncode) per call."""

    def answer(*answers: tuple[str, int]) -> list[list[str]]:
        calls: list[list[str]] = []
        queue = list(answers)

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            stdout, code = queue.pop(0)
            return subprocess.CompletedProcess(command, code, stdout, "")

        monkeypatch.setattr(gpu_module.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(gpu_module.subprocess, "run", run)
        return calls

    return answer


def test_nvml_reads_name_capability_memory_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "pynvml", FakeNvml([{"name": "NVIDIA A30", "capability": (8, 0), "mig": 0}])
    )
    report = detect_gpus({})
    assert report.source == "nvml"
    assert (report.driver, report.cuda_driver) == ("580.65.06", "13.1")
    assert report.gpus == (Gpu(0, "NVIDIA A30", "GPU-1", (8, 0), 85899345920, mig=False),)
    assert report.gpus[0].arch == "sm80"


def test_nvml_keeps_the_other_gpus_when_one_is_lost() -> None:
    nvml = FakeNvml(
        [
            {"name": "NVIDIA A100", "capability": (8, 0), "mig": 1},
            {"lost": FakeNvml.NVMLError(15, "GPU is lost")},
        ]
    )
    report = read_nvml(nvml)
    assert [(gpu.name, gpu.mig) for gpu in report.gpus] == [("NVIDIA A100", True)]
    assert report.problem == "GPU 1: GPU is lost"
    assert resolve_archs(report).warnings == ("not every GPU can be read: GPU 1: GPU is lost",)


def test_a_shutdown_that_fails_does_not_lose_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FakeNvml):
        def nvmlShutdown(self) -> None:
            raise self.NVMLError(1, "Uninitialized")

    monkeypatch.setitem(sys.modules, "pynvml", Failing([{"name": "NVIDIA A30", "capability": (8, 0)}]))
    assert [gpu.name for gpu in detect_gpus({}).gpus] == ["NVIDIA A30"]


def test_nvidia_smi_may_answer_in_another_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_nvml: None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"#!/bin/sh\necho '0, A30\xae, GPU-1, 8.0, 24576, 580.65.06, Disabled'\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu_module.shutil, "which", lambda name: str(program))
    assert [gpu.arch for gpu in detect_gpus({}).gpus] == ["sm80"]


def test_nvml_driver_mismatch_is_a_driver_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = FakeNvml.NVMLError(18, "RM has detected an NVML/RM version mismatch.")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], error))
    monkeypatch.setattr(gpu_module.shutil, "which", lambda name: None)
    report = detect_gpus({})
    assert report.problem == "RM has detected an NVML/RM version mismatch."
    with pytest.raises(UnsupportedError) as caught:
        resolve_archs(report)
    assert caught.value.code == "gpu-driver-error"


def test_no_library_and_no_nvidia_smi_is_no_gpu(monkeypatch: pytest.MonkeyPatch, no_nvml: None) -> None:
    monkeypatch.setattr(gpu_module.shutil, "which", lambda name: None)
    report = detect_gpus({})
    assert report == GpuReport()
    with pytest.raises(UnsupportedError) as caught:
        resolve_archs(report)
    assert caught.value.code == "gpu-not-found"
    assert "--arch sm80" in (caught.value.hint or "")


def test_nvidia_smi_is_the_fallback(smi: Any) -> None:
    calls = smi((A100, 0))
    report = detect_gpus({"CUDA_VISIBLE_DEVICES": "0"})
    assert report.source == "nvidia-smi"
    assert report.visible == "0"
    assert report.gpus[0].capability == (8, 0)
    assert report.gpus[0].memory_bytes == 81920 * 2**20
    assert len(calls) == 1


def test_old_driver_without_compute_cap_is_asked_again(smi: Any) -> None:
    old = A100.replace("8.0, ", "").replace("580.65.06", "470.82.01")
    calls = smi((OLD_DRIVER, 2), (old, 0))
    report = detect_gpus({})
    assert len(calls) == 2
    assert report.gpus[0].capability is None
    assert report.driver == "470.82.01"
    with pytest.raises(UnsupportedError) as caught:
        resolve_archs(report)
    assert "compute capability cannot be read" in caught.value.message
    assert "update the driver" in (caught.value.hint or "")
    assert resolve_archs(report, "sm80").archs == ("sm80",)


@pytest.mark.parametrize(
    ("stdout", "code", "problem"),
    [
        pytest.param("No devices were found\n", 6, None, id="none"),
        pytest.param("No devices were found\n", 0, None, id="none-with-zero"),
        pytest.param(MISMATCH, 18, "Driver/library version mismatch", id="mismatch"),
        pytest.param(NO_DRIVER, 9, "couldn't communicate with the NVIDIA driver", id="no-driver"),
    ],
)
def test_nvidia_smi_without_gpus(stdout: str, code: int, problem: str | None) -> None:
    report = parse_smi(stdout, "", code)
    assert report.gpus == ()
    assert (problem is None and report.problem is None) or problem in (report.problem or "")


def test_nvidia_smi_lists_several_and_mixed() -> None:
    report = parse_smi(A100 + RTX3090 + RTX4090 + H100, "", 0)
    assert [gpu.arch for gpu in report.gpus] == ["sm80", "sm86", "sm89", "sm90"]
    decision = resolve_archs(report)
    assert decision.archs == ("sm80", "sm86", "sm89")
    assert [gpu.name for gpu in decision.ignored] == ["NVIDIA H100 80GB HBM3"]
    assert decision.warnings == (
        "GPU 3 NVIDIA H100 80GB HBM3 is ignored: sm90 is newer than Ampere and Ada: "
        "stock vLLM has native kernels for it and is the better path",
    )


def test_nvidia_smi_reports_mig_and_a_lost_gpu() -> None:
    lost = "1, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]\n"
    report = parse_smi(MIG_ON + lost, "", 0)
    assert report.gpus[0].mig
    assert report.gpus[1].capability is None
    assert resolve_archs(report).archs == ("sm80",)


def test_an_a30_is_sm80_by_capability_whatever_its_name() -> None:
    assert parse_smi(A30, "", 0).gpus[0].arch == "sm80"
    renamed = A30.replace("NVIDIA A30", "NVIDIA A10")
    assert resolve_archs(parse_smi(renamed, "", 0)).archs == ("sm80",)


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        pytest.param((8, 7), "Jetson Orin", id="jetson"),
        pytest.param((7, 0), "older than Ampere", id="volta"),
        pytest.param((7, 5), "older than Ampere", id="turing"),
        pytest.param((9, 0), "stock vLLM has native kernels", id="hopper"),
        pytest.param((10, 0), "sm100 is newer", id="blackwell"),
        pytest.param((12, 0), "sm120 is newer", id="blackwell-consumer"),
        pytest.param((8, 8), "not one of sm80, sm86, sm89", id="unknown-8x"),
    ],
)
def test_cards_outside_the_served_ones_are_refused_with_the_reason(
    capability: tuple[int, int], reason: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolve_archs(GpuReport((card(0, "NVIDIA X", capability),)))
    assert caught.value.code == "arch-unsupported"
    assert reason in caught.value.message
    with pytest.raises(UnsupportedError) as asked:
        resolve_archs(GpuReport(), "sm{}{}".format(*capability))
    assert asked.value.code == "arch-unsupported"
    assert reason in asked.value.message


def test_jetson_refusal_names_the_checkpoint() -> None:
    with pytest.raises(UnsupportedError, match="510 GB checkpoint does not fit"):
        resolve_archs(GpuReport((card(0, "Orin", (8, 7)),)))


def test_arch_serves_a_machine_without_a_gpu_and_warns_where_it_differs() -> None:
    assert resolve_archs(GpuReport(), "sm86").warnings == ()
    decision = resolve_archs(GpuReport((card(0, "NVIDIA A100", (8, 0)),)), "sm86")
    assert decision.archs == ("sm86",)
    assert decision.warnings == ("--arch sm86, but GPU 0 of this machine is NVIDIA A100 (sm80)",)
    assert resolve_archs(GpuReport((card(0, "NVIDIA A100", (8, 0)),)), "8.0").warnings == ()


@pytest.mark.parametrize("text", ["ampere", "sm", "sm8x", "sm8\u00b2", ""])
def test_an_unknown_arch_name_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_archs(GpuReport(), text)
    assert caught.value.code == "arch-unknown"


def test_detection_never_imports_torch() -> None:
    code = "import sys; from deepinfer_cli.detect.gpu import detect_gpus; detect_gpus(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
