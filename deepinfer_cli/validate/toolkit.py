"""The CUDA compiler and assembler that this interpreter would use; standard library only: workers import it too."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

HOW = "install the CUDA toolkit (or pip install 'nvidia-cuda-nvcc>=13') so that nvcc is on PATH or below CUDA_HOME"


def find(tool: str) -> Path | None:
    """`nvcc` or `ptxas`, looked for as TileLang does: CUDA_HOME, PATH, pip's packages, /usr/local/cuda."""
    for folder in _folders():
        path = folder / tool
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


def _folders() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "bin"
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield Path(on_path).parent
        yield Path(on_path).resolve().parent
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        yield from (Path(root) / part / "bin" for part in ("cu13", "cuda_nvcc"))
    yield Path("/usr/local/cuda/bin")
