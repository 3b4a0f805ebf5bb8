"""Compares a kernel's outputs with the oracle's: shape, dtype, non-finite positions, then tolerance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_cli.validate import rules
from deepinfer_cli.validate.model import FirstBad

BOUND = ":bound"
# figures of which the smallest is the worst
_LEAST = frozenset({"equal_ratio"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one output, or all of them, compares; `reason` is empty when it matches.

    Attributes:
        max_abs: largest error over the finite elements.
        max_rel: the same relative to the oracle's value, or to the bound where the tolerance has one.
        matched_ratio: share of elements inside the tolerance.
        figures: what the tolerance's own rule measures, such as `cosine_difference` or `max_ulp`.
    """

    reason: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    matched_ratio: float | None = None
    first_bad: FirstBad | None = None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything matched."""
        return not self.reason


def tolerances_of(workloads: Any, case: Any) -> dict[str, Any]:
    """The tolerances of an op's outputs, as `case` asks for them."""
    return {
        name: item.for_case(case) if hasattr(item, "for_case") else item
        for name, item in workloads.TOLERANCES.items()
    }


def compare_outputs(got: dict[str, Any], want: dict[str, Any], tolerances: dict[str, Any]) -> Verdict:
    """Compares named outputs; the first that differs decides.

    Args:
        got: output name → tensor of the kernel.
        want: output name → tensor of the oracle; `NAME:bound` is no output but the companion of NAME.
        tolerances: output name → one of the tolerances of `ops.spec`.
    """
    names = [name for name in want if not name.endswith(BOUND)]
    if set(got) != set(names):
        return Verdict(f"outputs are {sorted(got)}, the oracle has {sorted(names)}")
    worst = Verdict(max_abs=0.0, max_rel=0.0, matched_ratio=1.0)
    for name in names:
        verdict = compare(name, got[name], want[name], tolerances[name], want.get(name + BOUND))
        if not verdict.ok:
            return verdict
        worst = _worse(worst, verdict)
    return worst


def compare(name: str, got: Any, want: Any, tolerance: Any, bound: Any | None = None) -> Verdict:
    """Compares one output with its oracle.

    Bit-exact means equal bytes for every finite value, -0 and infinities, and NaN at equal positions (their payloads
    may differ). What the other tolerances allow is said in `ops.spec`.

    Args:
        bound: the oracle's companion, which a sparse tolerance needs.
    """
    if tuple(got.shape) != tuple(want.shape):
        return _structural(name, "shape", tuple(got.shape), tuple(want.shape))
    dtype = rules.dtype_of(tolerance, want)
    if got.dtype != dtype:
        return _structural(name, "dtype", got.dtype, dtype)
    if getattr(tolerance, "kind", "") == "sparse" and (bound is None or bound.shape != want.shape):
        return Verdict(f"{name}: the oracle gave no {name}{BOUND} of its shape")
    want = want.to(got.device)
    bound = None if bound is None else bound.to(got.device)
    if got.numel() == 0:
        return Verdict(max_abs=0.0, max_rel=0.0, matched_ratio=1.0)
    misplaced = _non_finite_mismatch(got, want)
    if misplaced is not None and bool(misplaced.any()):
        finding = rules.Finding(misplaced, "non-finite values at other positions", want.double().abs())
    else:
        finding = rules.judge(got, want, tolerance, bound)
    return _verdict(name, got, want, finding)


def same_bytes(got: Any, want: Any) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes, NaN payloads included."""
    return bool((rules.bits(got) == rules.bits(want)).all())


def _worse(one: Verdict, other: Verdict) -> Verdict:
    figures = dict(one.figures)
    for name, value in other.figures.items():
        pick = min if name in _LEAST else max
        figures[name] = pick(figures.get(name, value), value)
    return replace(
        one,
        max_abs=max(one.max_abs or 0.0, other.max_abs or 0.0),
        max_rel=max(one.max_rel or 0.0, other.max_rel or 0.0),
        figures=figures,
    )


def _structural(name: str, what: str, got: object, want: object) -> Verdict:
    return Verdict(f"{name}: {what} is {got}, not {want}", first_bad=FirstBad(name, (), str(got), str(want)))


def _non_finite_mismatch(got: Any, want: Any) -> Any | None:
    if not got.is_floating_point():
        return None
    got, want = got.double(), want.double()
    infinite = got.isinf() | want.isinf()
    return (got.isnan() != want.isnan()) | (infinite & (got != want) & ~(got.isnan() | want.isnan()))


def _errors(got: Any, want: Any, size: Any) -> tuple[float, float]:
    import torch

    absolute = rules.difference(got, want)
    relative = torch.where(absolute == 0, 0.0, absolute / size)
    return float(absolute.max()), float(relative.nan_to_num(posinf=float("inf")).max())


def _verdict(name: str, got: Any, want: Any, finding: rules.Finding) -> Verdict:
    max_abs, max_rel = _errors(got, want, finding.size)
    count, total = int(finding.bad.sum()), finding.bad.numel()
    verdict = Verdict("", max_abs, max_rel, 1.0 - count / total, figures=finding.figures)
    if not count:
        return replace(verdict, reason=f"{name}: {finding.together}") if finding.together else verdict
    index = tuple(int(i) for i in finding.bad.nonzero()[0])
    return replace(
        verdict,
        reason=f"{name}: {count} of {total} elements {finding.what}",
        first_bad=FirstBad(name, index, str(got[index].item()), str(want[index].item())),
    )
