"""Which architecture's code the kernels of a measurement are, read from what was compiled and how."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.validate.compile_gate import LIMITS

OVERLAY, STOCK_SM80 = "overlay", "stock-sm80"
_BASELINE = "baseline"
_NVCC_ARCH = re.compile(r"(?:-arch=sm_|arch=compute_)(\d+a?)")


@dataclass(slots=True)
class Codegen:
    """Which architecture's code was made for the overlay, and for everything else.

    Attributes:
        arch: what is forced on the overlay's kernels; None on an SM8x card.
        seen: group of providers → architectures of the code that was compiled for it.
    """

    arch: str | None
    seen: dict[str, set[str]] = field(default_factory=dict)
    _now: str = ""

    def watch(self) -> None:
        """Listens to Triton's compiler from now on."""
        import triton

        before = triton.knobs.compilation.listener

        def listen(**event: Any) -> None:
            if before is not None:
                before(**event)
            self._note(triton_code(event))

        triton.knobs.compilation.listener = listen

    def watch_tilelang(self) -> None:
        """Listens to the nvcc commands of TileLang from now on; what it has in its cache is not seen."""
        from tilelang.contrib import nvcc

        stock = nvcc.compile_cuda

        def listen(
            code: Any, target_format: str = "ptx", arch: Any = None, *args: Any, **options: Any
        ) -> Any:
            self._note(nvcc_code(arch))
            return stock(code, target_format, arch, *args, **options)

        nvcc.compile_cuda = listen

    def _note(self, arch: str) -> None:
        self.seen.setdefault(self._now, set()).add(arch)

    @contextmanager
    def of(self, provider: str) -> Iterator[None]:
        """Within it kernels are compiled for `provider`: forced code for the overlay, the card's own for most others."""
        self._now = _group(provider)
        forced = {OVERLAY: self.arch, STOCK_SM80: "sm80"}.get(provider)
        with _override(forced):
            yield

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Within it Triton makes the forced code, and no provider gets it to its name."""
        self._now = ""
        with _override(self.arch):
            yield

    def name(self, provider: str) -> str:
        """`sm80` and the like, or `native`, from the code that was found.

        Raises:
            RuntimeError: the overlay's kernels are not, or not all, what was asked for.
        """
        found = self.seen.get(_group(provider), set())
        if provider != OVERLAY:
            return next(iter(found)) if len(found) == 1 and found <= set(LIMITS) else "native"
        if len(found) != 1 or (self.arch and found != {self.arch}):
            raise RuntimeError(
                f"the overlay's kernels were compiled for {sorted(found)}, not for {self.arch}"
            )
        return next(iter(found))


def _group(provider: str) -> str:
    return provider if provider in (OVERLAY, STOCK_SM80) else _BASELINE


@contextmanager
def _override(arch: str | None) -> Iterator[None]:
    if arch:
        os.environ["TRITON_OVERRIDE_ARCH"] = arch
    try:
        yield
    finally:
        with contextlib.suppress(KeyError):
            del os.environ["TRITON_OVERRIDE_ARCH"]


def triton_code(event: dict[str, Any]) -> str:
    """The architecture in the compiled kernel itself; its metadata would only repeat what was asked for."""
    paths = [Path(path) for name, path in event["metadata_group"].items() if name.endswith(".ttgir")]
    text = paths[0].read_text() if paths else ""
    for arch in LIMITS:
        if f'"cuda:{arch[2:]}"' in text:
            return arch
    return "native" if '"cuda:' in text else "unknown"


def nvcc_code(options: Any) -> str:
    """The architecture whose PTX an nvcc command makes: `-gencode arch=compute_80,code=sm_90` is sm80's code."""
    text = options if isinstance(options, str) else " ".join(map(str, options or ()))
    found = _NVCC_ARCH.findall(text)
    if len(found) != 1:
        return "unknown"
    return f"sm{found[0]}" if f"sm{found[0]}" in LIMITS else "native"
