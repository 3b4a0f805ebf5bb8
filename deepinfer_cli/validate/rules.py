"""What each kind of tolerance (`ops.spec`) asks of an output, once shape, dtype and non-finite positions agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_CODES = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found.

    Attributes:
        bad: bool tensor: the elements that break the rule on their own.
        what: what is wrong with those, in words.
        size: what an element's error is relative to, float64.
        together: what is wrong with the elements as a whole; empty when nothing is.
        figures: measures of the rule, for the report.
    """

    bad: Any
    what: str
    size: Any
    together: str = ""
    figures: dict[str, float] = field(default_factory=dict)


Rule = Callable[[Any, Any, Any, Any], Finding]


def judge(got: Any, want: Any, tolerance: Any, bound: Any | None) -> Finding:
    """Applies the rule of `tolerance`; `bound` is the oracle's companion tensor, where it has one."""
    if tolerance.bit_exact:
        return Finding(different_bytes(got, want), "not bit-exact", want.double().abs())
    return _RULES[getattr(tolerance, "kind", "plain")](got, want, tolerance, bound)


def dtype_of(tolerance: Any, want: Any) -> Any:
    """The dtype that the kernel's output must have."""
    import torch

    name = getattr(tolerance, "dtype", None)
    return want.dtype if name is None else getattr(torch, name)


def difference(got: Any, want: Any) -> Any:
    """|got - want| in float64; 0 where either is not finite."""
    got, want = got.double(), want.double()
    # equal infinities subtract to NaN; they match, as do NaN at equal positions
    return (got - want).abs().masked_fill(~(got.isfinite() & want.isfinite()), 0.0)


def different_bytes(got: Any, want: Any) -> Any:
    """Where the bytes differ; NaN equals NaN whatever its payload."""
    different = bits(got) != bits(want)
    if got.is_floating_point():
        different &= ~(got.isnan() & want.isnan())
    return different


def bits(tensor: Any) -> Any:
    """The elements as integers of their width."""
    import torch

    if tensor.dtype == torch.bool:
        return tensor
    return tensor.contiguous().view(getattr(torch, _CODES[tensor.element_size()]))


def _plain(got: Any, want: Any, tolerance: Any, _bound: Any) -> Finding:
    absolute, size = difference(got, want), want.double().abs()
    bad = (absolute > tolerance.max_abs) & (absolute > tolerance.max_rel * size)
    return Finding(bad, "outside the tolerance", size)


def _sparse(got: Any, want: Any, tolerance: Any, bound: Any) -> Finding:
    absolute, finite = difference(got, want), want.isfinite()
    limit = bound * tolerance.factor + tolerance.floor
    # not `>`: a bound that is NaN allows nothing
    bad = ~(absolute <= limit) & finite
    if tolerance.max_abs is not None:
        bad |= absolute > tolerance.max_abs
    computed = finite & (bound != 0)
    cosine = cosine_difference(got.double()[computed], want[computed])
    together = ""
    if not cosine <= tolerance.cosine:
        together = f"cosine difference {cosine:.3g}, more than {tolerance.cosine:g}"
    share = float((absolute / limit).masked_fill(~finite, 0.0).max())
    figures = {"cosine_difference": cosine, "share_of_limit": share}
    return Finding(bad, "outside the sparse-attention bound", bound, together, figures)


def cosine_difference(got: Any, want: Any) -> float:
    """1 - 2 sum(got * want) / sum(got^2 + want^2) in float64: 0 for equal vectors, and for two of zeros."""
    total = float((got * got + want * want).sum())
    return 1.0 - 2.0 * float((got * want).sum()) / total if total else 0.0


def _ulp(got: Any, want: Any, tolerance: Any, _bound: Any) -> Finding:
    away = (_rank(got) - _rank(want)).abs().masked_fill(want.isnan(), 0)
    unequal, total = int((away != 0).sum()), away.numel()
    together = ""
    if total - unequal < tolerance.equal_ratio * total:
        together = f"{unequal} of {total} elements are not equal, more than {1 - tolerance.equal_ratio:.3%}"
    figures = {"max_ulp": float(away.max()), "equal_ratio": (total - unequal) / total}
    what = f"more than {tolerance.max_ulp} ulp away"
    return Finding(away > tolerance.max_ulp, what, want.double().abs(), together, figures)


def _rank(tensor: Any) -> Any:
    """Each float's place among all floats of its type: neighbours differ by 1, 0 and -0 share 0."""
    import torch

    codes = bits(tensor).long()
    return torch.where(codes < 0, -(codes & ((1 << (8 * tensor.element_size() - 1)) - 1)), codes)


_RULES: dict[str, Rule] = {"plain": _plain, "sparse": _sparse, "ulp": _ulp}
