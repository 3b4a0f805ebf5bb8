"""Which architecture's kernels this process uses, and the three switches that change it.

Switches are environment variables, read when a module is bound (and when a kernel asks for the device):

- `DEEPINFER_DISABLE=1`: behave as stock; the other two are then not read.
- `DEEPINFER_DISABLE_OPS=gather,combine`: leave these ops to stock.
- `DEEPINFER_FORCE_ARCH=sm80`: use that architecture's kernels on whatever card is present, for testing.

On is `1`, `true` or `yes`; off is unset, empty, `0`, `false` or `no`. Anything else is an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

DISABLE = "DEEPINFER_DISABLE"
DISABLE_OPS = "DEEPINFER_DISABLE_OPS"
FORCE_ARCH = "DEEPINFER_FORCE_ARCH"

ARCHS = {(8, 0): "sm80", (8, 6): "sm86", (8, 9): "sm89"}
# bytes of shared memory that one CTA may have
SMEM_LIMITS = {"sm80": 166_912, "sm86": 101_376, "sm89": 101_376}
# a card of each architecture (A100, RTX A6000, RTX 4090): only used where no GPU can be asked
SM_COUNTS = {"sm80": 108, "sm86": 84, "sm89": 128}

_ON = frozenset({"1", "true", "yes"})
_OFF = frozenset({"", "0", "false", "no"})
_assumed_sm_count: int | None = None
_assumed_smem_limit: int | None = None


class SwitchError(ValueError):
    """A `DEEPINFER_*` variable has a value that means nothing."""


@dataclass(frozen=True)
class Device:
    """What a launch may know about the card.

    Attributes:
        capability: compute capability of the kernels to launch; the forced one when forced.
        arch: the same as text, such as `sm80`.
        smem_limit: bytes of shared memory that one CTA may have.
        forced: `DEEPINFER_FORCE_ARCH` chose it.
    """

    capability: tuple[int, int]
    arch: str
    smem_limit: int
    forced: bool

    @property
    def sm_count(self) -> int:
        """SMs of the current CUDA device, or what `assume` says; without CUDA a typical card of `arch`."""
        if _assumed_sm_count is not None:
            return _assumed_sm_count
        return _sm_count() or SM_COUNTS[self.arch]


def disabled() -> bool:
    """Whether `DEEPINFER_DISABLE` is on.

    Raises:
        SwitchError: the value is neither on nor off.
    """
    value = os.environ.get(DISABLE, "").strip().lower()
    if value not in _ON | _OFF:
        raise SwitchError(f"{DISABLE}={os.environ[DISABLE]!r} is neither on (1) nor off (0)")
    return value in _ON


def disabled_ops(known: Iterable[str]) -> tuple[str, ...]:
    """The ops that `DEEPINFER_DISABLE_OPS` leaves to stock, sorted.

    Raises:
        SwitchError: it names an op that is not among `known`.
    """
    names = {name.strip() for name in os.environ.get(DISABLE_OPS, "").split(",")} - {""}
    known = sorted(set(known))
    unknown = sorted(names - set(known))
    if unknown:
        raise SwitchError(
            f"{DISABLE_OPS} names unknown ops: {', '.join(unknown)}; known are {', '.join(known)}"
        )
    return tuple(sorted(names))


def enabled_ops(known: Iterable[str], skip: Iterable[str] = ()) -> tuple[str, ...]:
    """The ops of `known` that are neither in `skip` nor switched off, sorted."""
    known = set(known)
    return tuple(sorted(known - set(skip) - set(disabled_ops(known))))


def forced_arch() -> str | None:
    """The architecture that `DEEPINFER_FORCE_ARCH` names, or None.

    Raises:
        SwitchError: it is not one we have kernels for.
    """
    value = os.environ.get(FORCE_ARCH, "").strip().lower()
    if not value:
        return None
    if value not in SMEM_LIMITS:
        raise SwitchError(
            f"{FORCE_ARCH}={os.environ[FORCE_ARCH]!r} is unknown; known are {', '.join(SMEM_LIMITS)}"
        )
    return value


def capability() -> tuple[int, int] | None:
    """Compute capability of the CUDA device that this process uses; None without one.

    A process that has vLLM loaded asks vLLM's platform: through NVML it answers without starting CUDA, which
    would break vLLM's forked workers. Any other process (tests, benchmarks, workers) asks torch.
    """
    return _vllm_capability() if "vllm" in sys.modules else _torch_capability()


def device() -> Device | None:
    """The card as a launch should see it; None where it is not SM8x and nothing is forced.

    Raises:
        SwitchError: `DEEPINFER_FORCE_ARCH` is unknown.
    """
    forced = forced_arch()
    if forced is not None:
        return _device(forced, True, _assumed_smem_limit)
    arch = ARCHS.get(capability() or (0, 0))
    return _device(arch, False, _assumed_smem_limit) if arch else None


@contextmanager
def assume(*, sm_count: int | None = None, smem_limit: int | None = None) -> Iterator[None]:
    """Within the context every device has so many SMs and so much shared memory; None leaves it as it is.

    It runs the splits of cards we do not have, and the kernels of `verify --max-smem`.
    """
    global _assumed_sm_count, _assumed_smem_limit
    before = _assumed_sm_count, _assumed_smem_limit
    _assumed_sm_count = before[0] if sm_count is None else sm_count
    _assumed_smem_limit = before[1] if smem_limit is None else smem_limit
    try:
        yield
    finally:
        _assumed_sm_count, _assumed_smem_limit = before


@lru_cache
def _device(arch: str, forced: bool, assumed: int | None) -> Device:
    served = next(pair for pair, name in ARCHS.items() if name == arch)
    limit = SMEM_LIMITS[arch]
    return Device(served, arch, limit if assumed is None else min(limit, assumed), forced)


def _vllm_capability() -> tuple[int, int] | None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    # a visible ordinal: vLLM maps it through CUDA_VISIBLE_DEVICES itself
    found = current_platform.get_device_capability(_current_index())
    return (found.major, found.minor) if found is not None else None


def _torch_capability() -> tuple[int, int] | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def _current_index() -> int:
    """The current CUDA device, or 0 in a process that has not started CUDA; starts nothing."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda.current_device() if cuda is not None and cuda.is_initialized() else 0


def _sm_count() -> int | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return _sm_count_of(torch.cuda.current_device())


@lru_cache
def _sm_count_of(index: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)
