"""The payload's files: where they are, their hashes, and one digest for all."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from deepinfer_cli.errors import FailedError

PACKAGE = "deepinfer_sm80"
# where it is, from the folder that contains `vllm`
PAYLOAD_DIR = f"vllm/{PACKAGE}"


def sha256(data: bytes) -> str:
    """Hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Payload:
    """A copy of the payload on disk.

    Attributes:
        root: the package's folder.
        files: posix path below `root` → sha256 of the content.
    """

    root: Path
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """sha256 over every path and hash, in order."""
        text = "".join(f"{path} {self.files[path]}\n" for path in sorted(self.files))
        return sha256(os.fsencode(text))

    @property
    def version(self) -> str | None:
        """Its `__version__`, read without importing it; None when it states none."""
        source = self.read("__init__.py") if "__init__.py" in self.files else b""
        match = re.search(rb'^__version__ = "([^"]+)"', source, re.MULTILINE)
        return match[1].decode() if match else None

    def read(self, path: str) -> bytes:
        """The content of one file."""
        return (self.root / path).read_bytes()


def load(root: Path) -> Payload:
    """The payload below `root`; bytecode and caches are not part of it."""
    files = {
        path.relative_to(root).as_posix(): sha256(path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".pyc", ".pyo"}
    }
    return Payload(root, files)


def bundled() -> Payload:
    """The payload this DeepInfer came with.

    Raises:
        FailedError: DeepInfer is installed without it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FailedError(
            f"the overlay package {PACKAGE} is missing from this DeepInfer",
            code="payload-missing",
            hint="reinstall DeepInfer with pip",
        )
    return load(Path(spec.origin).parent)
