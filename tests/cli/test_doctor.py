"""`deepinfer doctor`: rows, hints, exit code, and probes that may break."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.commands import doctor
from deepinfer_cli.detect import vllm
from deepinfer_cli.detect.gpu import GpuReport
from deepinfer_cli.detect.requirements import cuda_major, pins
from tests.cli.conftest import Cli, install_into
from tests.conftest import FakeVllm

METADATA = """Metadata-Version: 2.4
Name: vllm
Version: 0.33.0
Requires-Dist: torch==2.14.0
Requires-Dist: tilelang==0.1.12
Requires-Dist: triton>=3; extra == "more"
Requires-Dist: nvidia-cutlass-dsl[cu13]==4.8.0
Requires-Dist: not a requirement at all
"""


def rows(out: str) -> dict[str, list[str]]:
    """Check → status, value, hint."""
    lines = [line.split("\t") for line in out.splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) == 4}


def interpreter(**versions: str | None) -> Callable[[Path], dict[str, object]]:
    """What a target's interpreter answers."""
    return lambda python: {
        "python": "3.12.1",
        "versions": {"torch": None, "triton": None, "tilelang": None} | versions,
        "torch_version_py": None,
        "cuda_home": None,
    }


def test_pins_come_from_the_metadata_of_this_vllm(tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text(METADATA)
    assert {name: str(value) for name, value in pins(tmp_path).items()} == {
        "torch": "==2.14.0",
        "tilelang": "==0.1.12",
    }
    assert cuda_major(tmp_path) == 13
    assert pins(None) == {}
    assert pins(tmp_path / "nothing") == {}
    assert cuda_major(None) is None


def test_a_machine_without_a_gpu_is_exit_1_with_the_way_on(cli: Cli, fake: FakeVllm) -> None:
    run = cli("doctor", "--target", fake.site)
    found = rows(run.out)
    assert run.code == 1
    assert found["architecture"][0] == "problem"
    assert "--arch sm80" in found["architecture"][2]
    assert found["vLLM"][:2] == ["ok", f"0.33.0, environment, {fake.root}"]
    assert found["overlay"] == ["ok", "not-installed", f"deepinfer install --target {fake.site} --arch sm80"]
    assert run.out.splitlines()[-1].startswith(f"{len(found) - 1} checks, 1 problem, ")


def test_packages_are_compared_with_what_vllm_pins(
    cli: Cli, fake: FakeVllm, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus((8, 0))
    next(fake.site.glob("*.dist-info")).joinpath("METADATA").write_text(METADATA)
    monkeypatch.setattr(doctor, "interpreter", interpreter(torch="2.14.0+cu130", tilelang="0.1.9"))
    run = cli("doctor", "--target", fake.site)
    found = rows(run.out)
    assert run.code == 0
    assert found["torch"] == ["ok", "2.14.0+cu130", "vLLM pins ==2.14.0"]
    assert found["tilelang"] == ["note", "0.1.9", "vLLM 0.33.0 pins tilelang==0.1.12"]
    assert found["triton"][:2] == ["note", "not installed"]
    assert found["GPU 0"] == ["ok", "NVIDIA Card, sm80, 80 GiB", "-"]
    assert found["driver"][1] == "580.65.06, runs CUDA up to 13.0 (nvml)"


def test_a_driver_too_old_for_this_vllm_is_an_error(
    cli: Cli, fake: FakeVllm, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus((8, 0))
    report = GpuReport(doctor.detect_gpus().gpus, "550.54", "12.4", "nvml")
    monkeypatch.setattr(doctor, "detect_gpus", lambda: report)
    next(fake.site.glob("*.dist-info")).joinpath("METADATA").write_text(METADATA)
    run = cli("doctor", "--target", fake.site)
    assert run.code == 1
    assert rows(run.out)["CUDA"][1] == "the driver runs CUDA up to 12.4, this vLLM is built for CUDA 13"


def test_a_probe_that_breaks_is_a_row(cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(python: Path) -> None:
        raise OSError("no such interpreter")

    monkeypatch.setattr(doctor, "interpreter", broken)
    found = rows(cli("doctor", "--target", fake.site).out)
    assert found["packages"] == ["note", "could not be checked: no such interpreter", "-"]
    assert "free disk" in found


def test_no_vllm_is_a_row_and_the_rest_still_answers(cli: Cli, tmp_path: Path) -> None:
    run = cli("doctor", "--target", tmp_path)
    found = rows(run.out)
    assert run.code == 1
    assert found["vLLM"][0] == "problem"
    assert "cache Triton" in found


def test_a_damaged_install_is_an_error_row(cli: Cli, fake: FakeVllm, gpus: Callable[..., None]) -> None:
    gpus((8, 0))
    install_into(cli, fake)
    assert rows(cli("doctor", "--target", fake.site).out)["overlay"] == ["ok", "installed", "-"]
    (fake.root / "deepinfer_sm80" / "gate.py").write_text("edited")
    run = cli("doctor", "--target", fake.site)
    assert run.code == 1
    assert rows(run.out)["overlay"] == ["problem", "modified", f"deepinfer status --target {fake.site}"]


def test_json_has_every_row_and_the_errors(cli: Cli, fake: FakeVllm) -> None:
    document = cli("doctor", "--target", fake.site, "--json").document
    assert document["status"] == "partial"
    assert [error["code"] for error in document["errors"]] == ["doctor-check"]
    assert {"check", "status", "value", "hint"} == set(document["data"]["checks"][0])


def test_the_real_interpreter_is_asked_without_importing_anything() -> None:
    import sys

    answer = doctor.interpreter(Path(sys.executable))
    assert answer["python"] == sys.version.split()[0]
    assert set(answer["versions"]) == {"torch", "triton", "tilelang"}
    assert {"torch_version_py", "cuda_home"} < set(answer)


def test_a_vllm_that_cannot_be_looked_at_is_a_row(
    cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/opt/vllm/__init__.py")

    monkeypatch.setattr(vllm, "find_target", broken)
    run = cli("doctor", "--target", fake.site)
    assert run.code == 1
    assert rows(run.out)["vLLM"] == ["problem", "/opt/vllm/__init__.py: Permission denied", "its permissions"]
    assert "nvcc" in rows(run.out)
