"""Compares a kernel's outputs with the oracle's: shape, dtype, non-finite positions, then tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer_cli.validate.model import FirstBad

_CODES = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one output, or all of them, compares; `reason` is empty when it matches."""

    reason: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    matched_ratio: float | None = None
    first_bad: FirstBad | None = None

    @property
    def ok(self) -> bool:
        """Whether everything matched."""
        return not self.reason


def compare_outputs(got: dict[str, Any], want: dict[str, Any], tolerances: dict[str, Any]) -> Verdict:
    """Compares named outputs; the first that differs decides.

    Args:
        got: output name → tensor of the kernel.
        want: output name → tensor of the oracle.
        tolerances: output name → object with `bit_exact`, `max_abs` and `max_rel`.
    """
    if set(got) != set(want):
        return Verdict(f"outputs are {sorted(got)}, the oracle has {sorted(want)}")
    worst = Verdict(max_abs=0.0, max_rel=0.0, matched_ratio=1.0)
    for name in want:
        tolerance = tolerances[name]
        verdict = compare(name, got[name], want[name], tolerance)
        if not verdict.ok:
            return verdict
        worst = Verdict(
            max_abs=max(worst.max_abs or 0.0, verdict.max_abs or 0.0),
            max_rel=max(worst.max_rel or 0.0, verdict.max_rel or 0.0),
            matched_ratio=1.0,
        )
    return worst


def compare(name: str, got: Any, want: Any, tolerance: Any) -> Verdict:
    """Compares one output with its oracle.

    Bit-exact means equal bytes for every finite value, -0 and infinities, and NaN at equal positions (their payloads
    may differ). With a tolerance an element fails only if it exceeds both `max_abs` and `max_rel`.
    """
    if tuple(got.shape) != tuple(want.shape):
        return _structural(name, "shape", tuple(got.shape), tuple(want.shape))
    if got.dtype != want.dtype:
        return _structural(name, "dtype", got.dtype, want.dtype)
    want = want.to(got.device)
    if got.numel() == 0:
        return Verdict(max_abs=0.0, max_rel=0.0, matched_ratio=1.0)
    misplaced = _non_finite_mismatch(got, want)
    if misplaced is not None and bool(misplaced.any()):
        return _verdict(name, "non-finite values at other positions", got, want, misplaced)
    bad = _different_bytes(got, want) if tolerance.bit_exact else _outside(got, want, tolerance)
    if bool(bad.any()):
        what = "not bit-exact" if tolerance.bit_exact else "outside the tolerance"
        return _verdict(name, what, got, want, bad)
    max_abs, max_rel = _errors(got, want)
    return Verdict(max_abs=max_abs, max_rel=max_rel, matched_ratio=1.0)


def same_bytes(got: Any, want: Any) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes, NaN payloads included."""
    return bool((_bits(got) == _bits(want)).all())


def _structural(name: str, what: str, got: object, want: object) -> Verdict:
    return Verdict(f"{name}: {what} is {got}, not {want}", first_bad=FirstBad(name, (), str(got), str(want)))


def _bits(tensor: Any) -> Any:
    import torch

    if tensor.dtype == torch.bool:
        return tensor
    return tensor.contiguous().view(getattr(torch, _CODES[tensor.element_size()]))


def _different_bytes(got: Any, want: Any) -> Any:
    different = _bits(got) != _bits(want)
    if got.is_floating_point():
        different &= ~(got.isnan() & want.isnan())
    return different


def _non_finite_mismatch(got: Any, want: Any) -> Any | None:
    if not got.is_floating_point():
        return None
    got, want = got.float(), want.float()
    infinite = got.isinf() | want.isinf()
    return (got.isnan() != want.isnan()) | (infinite & (got != want) & ~(got.isnan() | want.isnan()))


def _differences(got: Any, want: Any) -> tuple[Any, Any]:
    got, want = got.double(), want.double()
    absolute = (got - want).abs()
    # equal infinities subtract to NaN; they match, as do NaN at equal positions
    absolute = absolute.masked_fill(~(got.isfinite() & want.isfinite()), 0.0)
    return absolute, want.abs()


def _outside(got: Any, want: Any, tolerance: Any) -> Any:
    absolute, size = _differences(got, want)
    return (absolute > tolerance.max_abs) & (absolute > tolerance.max_rel * size)


def _errors(got: Any, want: Any) -> tuple[float, float]:
    import torch

    absolute, size = _differences(got, want)
    relative = torch.where(absolute == 0, 0.0, absolute / size)
    return float(absolute.max()), float(relative.nan_to_num(posinf=float("inf")).max())


def _verdict(name: str, what: str, got: Any, want: Any, bad: Any) -> Verdict:
    count = int(bad.sum())
    index = tuple(int(i) for i in bad.nonzero()[0])
    max_abs, max_rel = _errors(got, want)
    return Verdict(
        f"{name}: {count} of {bad.numel()} elements {what}",
        max_abs=max_abs,
        max_rel=max_rel,
        matched_ratio=1.0 - count / bad.numel(),
        first_bad=FirstBad(name, index, str(got[index].item()), str(want[index].item())),
    )
