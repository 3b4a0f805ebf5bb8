"""Runs the command line as a user does: through `main`, with captured output and no terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli import app
from deepinfer_cli.commands import doctor, install, status
from deepinfer_cli.detect import gpu
from deepinfer_cli.detect.gpu import Gpu, GpuReport
from deepinfer_cli.overlay import manifest as manifests
from deepinfer_cli.overlay import payload as payloads
from tests.conftest import FakeVllm

COLOUR_VARIABLES = ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "COLUMNS")
CACHE_VARIABLES = (
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TILELANG_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "XDG_CACHE_HOME",
)


@dataclass(frozen=True)
class Run:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document; fails unless it is all there is on stdout."""
        return json.loads(self.out)  # type: ignore[no-any-return]


Cli = Callable[..., Run]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("status", "--target", path)` → exit code, stdout, stderr."""

    def run(*arguments: object) -> Run:
        capsys.readouterr()
        code = app.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return run


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No colour switches and no caches of the user who runs the tests."""
    for name in (*COLOUR_VARIABLES, *CACHE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "home" / "inductor"))


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """This machine has no GPU; `gpus((8, 0), (9, 0))` gives it some."""

    def give(*capabilities: tuple[int, int], visible: str | None = None) -> None:
        cards = tuple(
            Gpu(index, "NVIDIA Card", f"GPU-{index}", capability, 80 * 2**30)
            for index, capability in enumerate(capabilities)
        )
        report = GpuReport(cards, "580.65.06", "13.0", "nvml", None, visible) if cards else GpuReport()
        for module in (install, status, doctor, gpu):
            monkeypatch.setattr(module, "detect_gpus", lambda: report)

    give()
    return give


@pytest.fixture
def fake(
    fake_vllm: Callable[..., FakeVllm],
    fake_payload: Callable[..., payloads.Payload],
    fake_manifest: manifests.Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> FakeVllm:
    """A small vLLM in a site-packages folder, and a small overlay as the bundled one."""
    use_payload(fake_payload(), fake_manifest, monkeypatch)
    return fake_vllm()


def use_payload(
    payload: payloads.Payload, manifest: manifests.Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes `payload` and `manifest` what this DeepInfer ships."""
    monkeypatch.setattr(payloads, "bundled", lambda: payload)
    monkeypatch.setattr(manifests, "load", lambda path=None: manifest)


def install_into(cli: Cli, vllm: FakeVllm, *more: str) -> Run:
    """Installs and expects success."""
    done = cli("install", "--target", vllm.site, "--arch", "sm80", "--yes", *more)
    assert done.code == 0, done.err
    return done
