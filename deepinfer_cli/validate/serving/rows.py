"""The rows of a serving result: what each run showed, medians and spreads; ratios are computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from deepinfer_cli.validate.results import Row
from deepinfer_cli.validate.serving import score
from deepinfer_cli.validate.serving.bench import Outcome
from deepinfer_cli.validate.serving.client import COUNTERS
from deepinfer_cli.validate.serving.plan import PREFILL, SCORE, Workload

DIFFERENCE = "nll-difference"
HITS = COUNTERS[1]
# metric → whether more is better
METRICS = {
    "prefill_tokens_per_s": True, "ttft_s": False, "decode_tokens_per_s": True, "output_tokens_per_s": True,
    "tpot_ms": False, "acceptance_length": True, "acceptance_rate": True,
}  # fmt: skip


def of_run(workload: Workload, outcome: Outcome) -> dict[str, Any]:
    """One run as part of a row: its seed, when it was, and its figures.

    Returns:
        seed, repeat, seconds, status, reason, metrics (of `METRICS`; tokens a second, seconds, milliseconds), and
        cached_tokens (of its prompts in the server's prefix cache; None where the server does not say).
    """
    found: dict[str, Any] = {
        "repeat": outcome.bench.repeat, "seed": outcome.bench.seed, "seconds": round(outcome.seconds, 2),
        "status": "PASSED", "reason": outcome.reason, "cached_tokens": None, "metrics": {},
    }  # fmt: skip
    if outcome.event is None or outcome.reason:
        found["status"] = "RUNTIME_ERROR"
        return found
    before, after, result = (outcome.event[name] for name in ("before", "after", "result"))
    if HITS in before and HITS in after:
        found["cached_tokens"] = int(after[HITS] - before[HITS])
    found["metrics"] = {name: round(value, 5) for name, value in metrics(workload, result).items()}
    found["input_tokens"] = sum(result["input_lens"])
    if workload.kind == PREFILL and found["cached_tokens"]:
        found["status"] = "FAILED"
        found["reason"] = f"not cold: {found['cached_tokens']} tokens came from the prefix cache"
    return found


def metrics(workload: Workload, result: Mapping[str, Any]) -> dict[str, float]:
    """Figures of one run, by what vLLM wrote of each request.

    Prefill's rate is a prompt's tokens over its time to first token. Decode's is the sum, over the streams, of a
    stream's tokens after the first over the time they took: what vLLM calls output throughput has the prefill in it.
    """
    ttfts = [float(value) for value in result["ttfts"]]
    if workload.kind == PREFILL:
        rates = [tokens / ttft for tokens, ttft in zip(result["input_lens"], ttfts, strict=True)]
        return {"prefill_tokens_per_s": statistics.median(rates), "ttft_s": statistics.median(ttfts)}
    spans = [sum(gaps) for gaps in result["itls"]]
    after_first = [tokens - 1 for tokens in result["output_lens"]]
    found: dict[str, float] = {"ttft_s": statistics.median(ttfts)}
    if all(spans) and all(count > 0 for count in after_first):
        pairs = list(zip(after_first, spans, strict=True))
        found["decode_tokens_per_s"] = sum(count / span for count, span in pairs)
        found["tpot_ms"] = statistics.median(1_000.0 * span / count for count, span in pairs)
    if result.get("output_throughput"):
        found["output_tokens_per_s"] = float(result["output_throughput"])
    for name in ("acceptance_length", "acceptance_rate"):
        if result.get(f"spec_decode_{name}") is not None:
            found[name] = float(result[f"spec_decode_{name}"])
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"p50": statistics.median(values), "min": min(values), "max": max(values)}


def row(
    workload: str, case: Mapping[str, Any], provider: str, runs: list[dict[str, Any]], codegen: str
) -> Row:
    """A row; what it says of the overlay is filled in when the server's log is read."""
    good = [run for run in runs if run["status"] == "PASSED"]
    names = list(good[0]["metrics"]) if good else []
    figures = {
        name: spread([run["metrics"][name] for run in good if name in run["metrics"]]) for name in names
    }
    bad = [run for run in runs if run["status"] != "PASSED"]
    status, reason = ("PASSED", "") if good and not bad else ("RUNTIME_ERROR", "no run")
    if bad:
        status, reason = bad[0]["status"], bad[0]["reason"]
    return {
        "op": "serving", "workload": workload, "case": dict(case), "provider": provider, "codegen": codegen,
        "metrics": figures, "runs": runs, "status": status, "reason": reason, "overlay": None,
    }  # fmt: skip


def score_rows(scores: Mapping[str, list[list[float]]], case: Mapping[str, Any], codegen: str) -> list[Row]:
    """Rows of the scored text: each side's NLL, and how far runs are apart, of one side and of both.

    Args:
        scores: side's name → each run's NLLs, token by token.
    """
    found = []
    for name, runs in scores.items():
        figures = [
            {
                "repeat": number,
                "status": "PASSED",
                "reason": "",
                "metrics": {"nll": round(sum(one) / len(one), 6)},
            }
            for number, one in enumerate(runs)
        ]
        found.append(row(SCORE, case, name, figures, codegen))
    names = list(scores)
    pairs: list[tuple[str, Iterable[tuple[list[float], list[float]]]]] = [
        (f"{name} against itself", combinations(scores[name], 2)) for name in names
    ]
    if len(names) == 2:
        pairs.append((f"{names[0]} against {names[1]}", product(scores[names[1]], scores[names[0]])))
    for name, these in pairs:
        apart = [
            {"repeat": number, "status": "PASSED", "reason": "", "metrics": score.apart(first, second)}
            for number, (first, second) in enumerate(these)
        ]
        if apart:
            found.append(row(DIFFERENCE, case, name, apart, codegen))
    return found


def partner(rows: Iterable[Row], one: Row) -> Row | None:
    """The other side's row of the same workload."""
    same = ("workload", "case")
    others = [
        other for other in rows
        if all(other[name] == one[name] for name in same) and other["provider"] != one["provider"]
    ]  # fmt: skip
    return others[0] if others else None


def ratio(rows: Iterable[Row], one: Row, metric: str) -> float | None:
    """How many times better `one` is than the other side, by medians; above 1 is better, also where less is."""
    other = partner(rows, one)
    if other is None or metric not in one["metrics"] or metric not in other["metrics"]:
        return None
    mine, its = float(one["metrics"][metric]["p50"]), float(other["metrics"][metric]["p50"])
    if not mine or not its:
        return None
    return mine / its if METRICS[metric] else its / mine


def apart(rows: Iterable[Row], one: Row, metric: str) -> bool | None:
    """Whether all runs of one side are better than all of the other: a difference no single run contradicts."""
    other = partner(rows, one)
    if other is None or metric not in one["metrics"] or metric not in other["metrics"]:
        return None
    mine, its = one["metrics"][metric], other["metrics"][metric]
    return bool(mine["min"] > its["max"] or mine["max"] < its["min"])
