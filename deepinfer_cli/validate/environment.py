"""The environment block of a result file, as a worker sees it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """gpu, driver, cuda, torch, triton, tilelang, vllm; None for what is not there."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "tilelang": _version("tilelang"),
        "vllm": _vllm_version(),
    }


def driver_version() -> str | None:
    """The NVIDIA driver's version."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if match := re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text):
            return match[1]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        lines = done.stdout.split() if done.returncode == 0 else []
        return lines[0] if lines else None
    return None


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _vllm_version() -> str | None:
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    return str(loaded) if loaded else None
