"""CUDA as one interpreter sees it: torch's runtime, and the nvcc that TileLang would call; asked without importing either."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMEOUT_S = 30
# the first driver of each CUDA major; within a major older drivers run newer toolkits' code, but no newer PTX
MIN_DRIVER = {11: 450, 12: 525, 13: 580}
# asked of the target's interpreter, which may have no DeepInfer. The lookup is TileLang's (`tilelang/env.py`): the first
# place that exists is taken, whatever is in it
_SCRIPT = """
import importlib.metadata as m, importlib.util as u, json, os, shutil, sys
found = {"python": sys.version.split()[0], "versions": {}, "torch_version_py": None, "cuda_home": None}
for name in ("torch", "triton", "tilelang"):
    try: found["versions"][name] = m.version(name)
    except m.PackageNotFoundError: found["versions"][name] = None
spec = u.find_spec("torch")
for folder in (spec.submodule_search_locations or ()) if spec else ():
    try: found["torch_version_py"] = open(os.path.join(folder, "version.py"), encoding="utf-8").read(4096)
    except OSError: pass
home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
if home is None:
    nvcc = shutil.which("nvcc")
    if nvcc:
        home = os.path.dirname(os.path.dirname(nvcc))
        if "cuda" not in nvcc.lower() and "hpc_sdk" in nvcc.lower():
            home = os.path.dirname(home)
    else:
        try: files = m.files("nvidia-cuda-nvcc") or []
        except m.PackageNotFoundError: files = None
        if files is not None:
            home = next((str(one.locate().parent.parent) for one in files if one.name == "nvcc"), "")
        else:
            home = next((one for one in ("/usr/local/cuda", "/opt/nvidia/hpc_sdk/Linux_x86_64") if os.path.exists(one)), "")
    # what CUDA_HOME says is believed, what is guessed must exist
    home = home if home and os.path.exists(home) else None
found["cuda_home"] = home or None
print(json.dumps(found))
"""
_RUNTIME = re.compile(r"^cuda\s*(?::[^=\n]*)?=\s*['\"](\d+\.\d+)", re.M)
_LOCAL = re.compile(r"\+cu(\d{2})(\d+)")
_HEADER = re.compile(r"^\s*#\s*define\s+CUDA_VERSION\s+(\d+)", re.M)
_HERE = re.compile(r"^#\$ _HERE_=(\S+)", re.M)
_RELEASE = re.compile(r"release (\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class Toolkit:
    """The CUDA toolkit that TileLang compiles with.

    Attributes:
        home: its folder; None where TileLang finds none.
        release: of nvcc, such as `13.0`; None where it does not run.
        headers: CUDA version of `include/cuda.h`; None without it.
        problem: why it cannot compile, or None.
    """

    home: Path | None
    release: str | None = None
    headers: str | None = None
    problem: str | None = None


def interpreter(python: Path) -> dict[str, Any]:
    """What `python` has, from metadata and files: nothing is imported.

    Returns:
        `python` (its version), `versions` of torch, triton and tilelang, `torch_version_py` (text), `cuda_home`.
    """
    command = [str(python), "-I", "-c", _SCRIPT]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=True
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def torch_cuda(version_py: str | None, version: str | None) -> str | None:
    """CUDA runtime that torch is built for: what its `version.py` says, else the `+cu130` of its version."""
    if found := _RUNTIME.search(version_py or ""):
        return found[1]
    local = _LOCAL.search(version or "")
    return f"{local[1]}.{local[2]}" if local else None


def driver_problem(driver: str | None, cuda_driver: str | None, runtime: str) -> tuple[str, str] | None:
    """What is wrong with a driver for code of CUDA `runtime`.

    Args:
        driver: its version, such as `580.65.06`.
        cuda_driver: the highest CUDA that it runs; None where it is not said (nvidia-smi).

    Returns:
        `problem` or `note`, and a sentence; None where it fits, or where there is no driver to look at.
    """
    major = int(runtime.split(".")[0])
    if cuda_driver is None:
        first = MIN_DRIVER.get(major)
        number = (driver or "").split(".")[0]
        if first and number.isdecimal() and int(number) < first:
            return "problem", f"driver {driver} is older than {first}, the first for CUDA {major}"
        return None
    if _numbers(cuda_driver)[0] < major:
        return "problem", f"the driver runs CUDA up to {cuda_driver}, torch is built for CUDA {runtime}"
    if _numbers(cuda_driver) < _numbers(runtime):
        return (
            "note",
            f"the driver runs CUDA up to {cuda_driver}, torch is built for {runtime}: kernels that it ships run, newer PTX does not",
        )
    return None


def driver_hint(major: int) -> str:
    """What to do about a driver that is too old for CUDA `major`."""
    first = MIN_DRIVER.get(major)
    return f"update the driver ({first} or newer for CUDA {major})" if first else "update the driver"


def toolkit(home: Path | None) -> Toolkit:
    """What is in the folder that TileLang takes; runs nvcc, and compiles nothing."""
    if home is None:
        return Toolkit(None, problem="not found: neither CUDA_HOME nor PATH nor a pip package has it")
    nvcc = home / "bin" / "nvcc"
    if not (nvcc.is_file() and os.access(nvcc, os.X_OK)):
        return Toolkit(home, problem=f"TileLang takes {home}, and there is no bin/nvcc in it")
    said = _nvcc(nvcc, "--version")
    match = _RELEASE.search(said)
    release = match[1] if match else None
    if release is None:
        return Toolkit(home, problem=f"{nvcc} does not run: {said[:200] or 'it says nothing'}")
    # what TileLang calls may be a wrapper or a link: the compiler's own folder has the headers
    here = _HERE.search(_nvcc(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull))
    headers = _header((Path(here[1]).parent if here else home) / "include" / "cuda.h")
    if headers is None:
        return Toolkit(home, release, None, f"nvcc {release} has no headers beside it (include/cuda.h)")
    if headers != release:
        return Toolkit(
            home,
            release,
            headers,
            f"nvcc is {release}, the headers beside it are of {headers}: kernels may not compile",
        )
    return Toolkit(home, release, headers)


def _nvcc(nvcc: Path, *arguments: str) -> str:
    command = [str(nvcc), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def _header(path: Path) -> str | None:
    try:
        found = _HEADER.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
