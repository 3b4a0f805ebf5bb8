"""What this card can do at most, measured in the run itself: copying memory, and multiplying with `mma.sync`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepinfer_cli.validate import timing
from deepinfer_cli.validate.compile_gate import LIMITS

COPY, MMA = "copy", "mma"
_SIZE = 8192
_SAMPLES = 7
# rows, columns and depth of a CTA's tile, warps, stages; the best that fits the architecture is the ceiling
_TILES = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 3))


@dataclass(frozen=True, slots=True)
class Roofs:
    """The two ceilings.

    Attributes:
        copy: bytes per second of a device-to-device copy, read and written both counted.
        mma: FLOPs per second of a bf16 product in the architecture's code; None where it was not measured.
    """

    copy: float
    mma: float | None = None

    def figure(self, name: str) -> float | None:
        """The ceiling of that name in GB/s or TFLOP/s, as rows hold it."""
        if name == COPY:
            return round(self.copy / 1e9, 1)
        return round(self.mma / 1e12, 1) if self.mma else None

    def binding(self, moved: int, flops: int) -> tuple[str, float]:
        """The ceiling that takes longer for so many bytes and FLOPs, and the seconds that it takes."""
        seconds = {COPY: moved / self.copy, MMA: flops / self.mma if self.mma else 0.0}
        name = max(seconds, key=lambda roof: seconds[roof])
        return name, seconds[name]


def mma_rate(arch: str, compiling: Callable[[], Any]) -> float:
    """FLOPs per second of a large bf16 product in the code of `arch`, the best of a few tile shapes.

    Args:
        arch: its shared-memory limit is kept, whatever the card has.
        compiling: a context within which Triton makes that architecture's code.

    Raises:
        RuntimeError: no tile shape gives the right product.
    """
    import torch

    from deepinfer_cli.validate import product

    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randn((_SIZE, _SIZE), generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    c = torch.empty_like(a)
    want = a[:256].float() @ b[:, -256:].float()
    best, problems = 0.0, []
    with compiling():
        for tile in _TILES:
            c.fill_(float("nan"))
            try:
                shared = product.multiply(a, b, c, tile)
                if shared > LIMITS[arch].shared_per_cta:
                    continue
                worst = float((c[:256, -256:].float() - want).abs().max() / want.abs().max())
                if not worst < 0.01:
                    problems.append(f"{tile} is wrong by {worst:.2g}")
                    continue
                best = max(best, _rate(partial(_multiply, a, b, c, tile)))
            except Exception as error:
                problems.append(f"{tile}: {type(error).__name__}: {error}"[:200])
    if not best:
        raise RuntimeError(f"no mma.sync ceiling: {'; '.join(problems)}")
    return best


def _multiply(a: Any, b: Any, c: Any, tile: tuple[int, int, int, int, int], _inputs: dict[str, Any]) -> None:
    from deepinfer_cli.validate import product

    product.multiply(a, b, c, tile)


def _rate(call: timing.Call) -> float:
    timer = timing.GraphTimer(call, [{}])
    return 2.0 * _SIZE**3 / (statistics.median(timer.sample() for _ in range(_SAMPLES)) * 1e-6)
