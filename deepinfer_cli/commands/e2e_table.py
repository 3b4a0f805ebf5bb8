"""What `deepinfer verify --e2e` found: in a table, in lines, and for the JSON document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from deepinfer_cli.commands import common
from deepinfer_cli.errors import ExitCode
from deepinfer_cli.render import plural
from deepinfer_cli.result import ErrorItem
from deepinfer_cli.validate.e2e import compare

if TYPE_CHECKING:
    from deepinfer_cli.commands.e2e import E2eOptions, Outcome


def rows(findings: Iterable[tuple[str, compare.Finding]]) -> list[tuple[object, ...]]:
    """One row for all prompts of a run, a check and a phase: how many, and the worst."""
    grouped: dict[tuple[str, str, str], list[compare.Finding]] = {}
    for name, finding in findings:
        grouped.setdefault((name, finding.kind, finding.phase), []).append(finding)
    result: list[tuple[object, ...]] = []
    for key, group in grouped.items():
        numbers = [
            max((value for one in group if (value := getattr(one, name)) is not None), default=None)
            for name in ("mean", "rms", "p99", "largest")
        ]
        shown = [None if value is None else f"{value:.2e}" for value in numbers]
        status = "passed" if all(one.ok for one in group) else "failed"
        result.append((*key, len(group), *shown, status))
    return result


def facts(document_: dict[str, Any]) -> str:
    """One line about a run: how long, KV cache, step times."""
    answer, times = document_["answer"] or {}, document_["phases"].get("times", {})
    parts = [f"{document_['name']}: {document_['seconds']:.0f} s"]
    if answer.get("kv_blocks"):
        tokens = f" ({document_['kv_tokens']:,} tokens)" if document_["kv_tokens"] else ""
        parts.append(f"{answer['kv_blocks']:,} KV blocks{tokens}")
    parts += [
        f"{name.removesuffix('_ms').replace('_', ' of ')} {times[name]['median']:.2f} ms"
        for name in times
        if name.endswith("_ms")
    ]
    return ", ".join(parts)


def verdict(outcome: Outcome) -> tuple[ExitCode, tuple[ErrorItem, ...]]:
    """Exit code and errors."""
    if not outcome.failed:
        return ExitCode.OK, ()
    names = tuple(
        dict.fromkeys(f"{name} {finding.kind} {finding.phase}".strip() for name, finding in outcome.failed)
    )
    what = f"end to end, {plural(len(outcome.failed), 'check')} failed"
    return ExitCode.FAILED, (
        ErrorItem("verify-failed", what, "the lines above say which, and the logs why", names),
    )


def data(opts: E2eOptions, arch: str, outcome: Outcome) -> dict[str, Any]:
    """For the JSON document."""
    return {
        "target": common.target_data(opts.target),
        "python": str(opts.python),
        "arch": arch,
        "tolerances": {
            "mean": compare.MEAN, "rms": compare.RMS, "p99": compare.P99, "decode_rms": compare.DECODE_RMS,
        },
        "findings": [{"run": name, **finding.to_json()} for name, finding in outcome.findings],
        "runs": outcome.documents,
        "not_run": [{"configuration": name, "reason": reason} for name, reason in outcome.not_run],
        "notes": outcome.notes,
    }  # fmt: skip
