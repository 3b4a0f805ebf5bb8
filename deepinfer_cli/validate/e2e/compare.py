"""Holds end-to-end documents against themselves and each other; pure.

Those of mean and p99 are a little over twice what stock vLLM 0.33.0 on an H200 differs from itself by on this model: mean
negative log-likelihood per prompt 1.9e-3 with the same and 2.4e-3 with another batching, p99 per token 0.133. With random
weights a rounding sometimes sends a token to another expert, so that single tokens say little: stock's decode was off
its own prefill by 0.41 in one token of 112. Root mean squares are of all but the largest fiftieth. Greedy tokens are no measure:
two are often about equally likely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

MEAN = 8e-3
P99 = 0.3
# runs that agree differ by at most 0.036, measured on an H200; the indices of another group by 0.056 at 3,000 tokens, a
# window that is off by one by 0.056
RMS = 0.045
# decode against prefill, of all tokens of a phase: stock 0.066 at most, decode that is not rotated back 0.25
DECODE_RMS = 0.12
LIKELY = 0.3
# of this many tokens the mean is that steady; that of a shorter prompt varies as the root of the ratio
_STEADY = 130


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison.

    Attributes:
        kind: `against` another run, `chunks`, `decode` against prefill, `prefix`, `far`, `parameters`, `run`.
        phase: the phase it is about.
        length: tokens of the prompt; 0 where there is no one prompt.
        mean: difference of the means. rms: of the tokens' differences, in `against` and `chunks` without the largest fiftieth.
            p99, largest: of the tokens' differences. None where there are none.
        ok: within the tolerances.
        reason: what is wrong, in words; empty if all is well.
    """

    kind: str
    phase: str
    length: int
    mean: float | None
    rms: float | None
    p99: float | None
    largest: float | None
    ok: bool
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Field by field."""
        return asdict(self)


def mean_tolerance(length: int) -> float:
    """How far the mean NLL of a prompt of `length` tokens may be off."""
    return MEAN * max(1.0, math.sqrt(_STEADY / max(1, length)))


def of_run(document: dict[str, Any]) -> list[Finding]:
    """What one run says of itself: it is complete, decode agrees with prefill, chunk sizes do not matter."""
    found = [] if document["complete"] else [_bad("run", "", "the run is not complete")]
    phases = document["phases"]
    for name, phase in phases.items():
        if name.startswith("chunks") and "prompts" in phases:
            found += _rows("chunks", name, phases["prompts"]["rows"], phase["rows"])
        found += _decode(name, phase.get("rows", ()))
        if "first" in phase:
            found.append(_same_places("far", name, phase, phase["last_decoded"], phase["last_prefilled"]))
        if "cached_tokens" in phase and not phase["cached_tokens"]:
            found.append(_bad("prefix", name, "nothing came from the prefix cache"))
    return found


def against(document: dict[str, Any], other: dict[str, Any]) -> list[Finding]:
    """The prompts' NLL in two runs of one model; first their lists of parameters."""
    found = list(parameters(document, other))
    for name, phase in document["phases"].items():
        reference = other["phases"].get(name)
        if "rows" not in phase and "first" not in phase:
            continue
        if reference is None:
            found.append(_bad("against", name, f"{other['name']} has no result"))
        elif "first" in phase:
            found.append(_same_places("against", name, phase, phase["first"], reference["first"]))
        elif any(row["nll"] for row in phase.get("rows", ())):
            found += _rows("against", name, reference["rows"], phase["rows"])
    return found


def same_lengths(
    kind: str, phase: str, expected: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> list[Finding]:
    """Those of the expected prompts that `rows` has too, and decode against prefill."""
    wanted = {row["length"]: row for row in expected}
    common = [row for row in rows if row["length"] in wanted]
    found = list(_rows(kind, phase, [wanted[row["length"]] for row in common], common))
    return found + list(_decode(phase, common))


def parameters(document: dict[str, Any], other: dict[str, Any]) -> Iterator[Finding]:
    """Nothing where both lists (name, shape, dtype) are the same; only then the values are."""
    mine, theirs = document["parameters"], other["parameters"]
    if not mine or not theirs:
        yield _bad("parameters", "", "a run left no list of its parameters")
    if len(mine) != len(theirs):
        # the stages of a pipeline have one model's between them
        mine, theirs = _of_all_ranks(mine), _of_all_ranks(theirs)
    for key in sorted(mine.keys() | theirs.keys()):
        left = {tuple(_entry(one)) for one in mine.get(key, ())}
        right = {tuple(_entry(one)) for one in theirs.get(key, ())}
        if left != right:
            some = ", ".join(str(one[0]) for one in sorted(left ^ right, key=str)[:3])
            yield _bad("parameters", key, f"{len(left ^ right)} parameters differ, such as {some}")


def _of_all_ranks(lists: dict[str, list[list[Any]]]) -> dict[str, list[list[Any]]]:
    """`target-0`, `target-1` … → `target`."""
    found: dict[str, list[list[Any]]] = {}
    for key, entries in lists.items():
        found.setdefault(key.partition("-")[0], []).extend(entries)
    return found


def _entry(one: list[Any]) -> tuple[Any, ...]:
    # the kind follows from the others, and a draft's vocabulary may come from the target
    name, shape = str(one[0]), tuple(one[1])
    # FlashMLA has sinks for 64 heads however many a rank has; those that it has are the same
    return name, () if name.endswith(".attn_sink") else shape, str(one[2])


def _rows(
    kind: str, phase: str, expected: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> Iterator[Finding]:
    if [row["length"] for row in expected] != [row["length"] for row in rows]:
        yield _bad(kind, phase, "the prompts are not the same")
        return
    for want, row in zip(expected, rows, strict=True):
        yield _numbers(kind, phase, row["length"], want["nll"], row["nll"])


def _numbers(kind: str, phase: str, length: int, want: list[float], got: list[float]) -> Finding:
    if len(want) != len(got) or not got:
        return _bad(kind, phase, f"{len(got)} values instead of {len(want)}", length)
    if not all(map(math.isfinite, [*want, *got])):
        return _bad(kind, phase, "a value is not finite", length)
    differences = sorted(abs(a - b) for a, b in zip(want, got, strict=True))
    mean = abs(sum(want) - sum(got)) / len(got)
    rms = _rms(differences[: len(differences) * 49 // 50] or differences)
    p99 = differences[min(len(differences) - 1, int(len(differences) * 0.99))]
    reasons = []
    if mean > mean_tolerance(length):
        reasons.append(f"mean NLL is off by {mean:.2e}, allowed {mean_tolerance(length):.2e}")
    if rms > RMS and length >= _STEADY:
        reasons.append(f"the tokens are off by {rms:.3f} (root mean square), allowed {RMS:g}")
    if p99 > P99:
        reasons.append(f"p99 of the tokens is off by {p99:.3f}, allowed {P99:g}")
    return Finding(kind, phase, length, mean, rms, p99, differences[-1], not reasons, "; ".join(reasons))


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _decode(phase: str, rows: Iterable[dict[str, Any]]) -> Iterator[Finding]:
    """All decoded tokens of a phase together."""
    differences = []
    for row in rows:
        if "decoded" not in row:
            continue
        pairs = list(zip(row["decoded"], row["prefilled"], strict=False))
        if len(row["decoded"]) != len(row["prefilled"]) or not pairs:
            yield _bad("decode", phase, "decoded and prefilled tokens are not the same", row["length"])
        elif not all(math.isfinite(value) for pair in pairs for value in pair):
            yield _bad("decode", phase, "a value is not finite", row["length"])
        else:
            differences += [abs(a - b) for a, b in pairs]
    if not differences:
        return
    differences.sort()
    # one in a hundred may go to another expert, and one at least
    rms, p99 = _rms(differences), differences[-1 - min(len(differences) - 1, max(1, len(differences) // 100))]
    reasons = []
    if rms > DECODE_RMS:
        reasons.append(f"decode is {rms:.3f} from prefill (root mean square), allowed {DECODE_RMS:g}")
    if p99 > P99:
        reasons.append(f"p99 of decode is {p99:.3f} from prefill, allowed {P99:g}")
    yield Finding("decode", phase, 0, None, rms, p99, differences[-1], not reasons, "; ".join(reasons))


def _same_places(
    kind: str, phase: str, result: dict[str, Any], got: dict[str, float], want: dict[str, float]
) -> Finding:
    """Log-probabilities of one place's likeliest tokens: most must be in both, and those agree."""
    common = got.keys() & want.keys()
    length = int(result["length"])
    if len(common) * 2 < len(want):
        return _bad(
            kind, phase, f"only {len(common)} of the {len(want)} likeliest tokens are the same", length
        )
    if not all(math.isfinite(side[token]) for side in (got, want) for token in common):
        return _bad(kind, phase, "a value is not finite", length)
    largest = max(abs(got[token] - want[token]) for token in common)
    reason = "" if largest <= LIKELY else f"a likely token is off by {largest:.3f}, allowed {LIKELY:g}"
    return Finding(kind, phase, length, None, None, None, largest, not reason, reason)


def incomplete(reason: str) -> Finding:
    """A run that has not all its results."""
    return _bad("run", "", reason)


def _bad(kind: str, phase: str, reason: str, length: int = 0) -> Finding:
    return Finding(kind, phase, length, None, None, None, None, False, reason)
