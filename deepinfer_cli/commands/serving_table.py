"""The tables of `deepinfer bench --serving`, from the rows of its result file; pure."""

from __future__ import annotations

from typing import Any

from deepinfer_cli.render import Justify, Table, table
from deepinfer_cli.validate.serving import plan, rows

RIGHT: Justify = "right"
# metric → its name in the table, and how many digits after the point
SHOWN = {
    "prefill_tokens_per_s": ("prefill, tokens/s", 1), "ttft_s": ("time to first token, s", 3),
    "decode_tokens_per_s": ("decode, tokens/s", 1), "output_tokens_per_s": ("output throughput, tokens/s", 1),
    "tpot_ms": ("time per output token, ms", 2), "acceptance_length": ("tokens accepted a step", 2),
    "acceptance_rate": ("drafts accepted, %", 1),
}  # fmt: skip


def what(row: dict[str, Any]) -> str:
    """A row's workload in words."""
    case = row["case"]
    if row["workload"] == plan.PREFILL:
        return f"cold prefill, {case['input_tokens']:,} tokens"
    if row["workload"] == plan.DECODE:
        streams = f"{case['streams']} stream{'s' if case['streams'] > 1 else ''}"
        return f"decode, {streams}, {case['output_tokens']} tokens, {case['prompts']} prompts"
    return f"{row['workload']}, {case.get('tokens', 0):,} tokens"


def overlay_text(row: dict[str, Any]) -> str:
    """What is known of the overlay in a row's servers: `live, 20 ops`, `unknown`."""
    parts = []
    for one in row["overlay"].values():
        ops = f", {len(one['bound'])} ops bound" if one["bound"] else ""
        off = f", {len(one['off'])} switched off" if one["off"] else ""
        parts.append(f"{one['state']}{ops}{off}")
    return "; ".join(parts)


def tables(all_rows: list[dict[str, Any]]) -> list[Table]:
    """A table of speeds, both servers beside each other, and one of the scored text."""
    speeds = [row for row in all_rows if row["workload"] in (plan.PREFILL, plan.DECODE)]
    scores = [row for row in all_rows if row["workload"] in (plan.SCORE, rows.DIFFERENCE)]
    first = next((row["provider"] for row in speeds), plan.OVERLAY)
    pairs = [(row, rows.partner(speeds, row)) for row in speeds if row["provider"] == first]
    second = next((other["provider"] for _, other in pairs if other), plan.ENABLE_ONLY)
    headers: list[str | tuple[str, Justify]] = [
        "Workload", "Metric", (first, RIGHT), ("least-most", RIGHT), (second, RIGHT), ("least-most", RIGHT),
        ("Ratio", RIGHT), "Overlay", "Status",
    ]  # fmt: skip
    names: list[str | tuple[str, Justify]] = [
        "Text", "Server", "Metric", ("Median", RIGHT), ("least-most", RIGHT), ("Runs", RIGHT), "Overlay",
    ]  # fmt: skip
    found = [table(headers, [line for pair in pairs for line in _lines(speeds, *pair)])]
    return found + ([table(names, [line for row in scores for line in _score(row)])] if scores else [])


def _lines(
    all_rows: list[dict[str, Any]], row: dict[str, Any], other: dict[str, Any] | None
) -> list[list[object]]:
    both = [row] + ([other] if other else [])
    overlay = " / ".join(overlay_text(one) for one in both)
    status = " / ".join(dict.fromkeys(one["status"] for one in both))
    metrics = list(dict.fromkeys(name for one in both for name in one["metrics"]))
    found: list[list[object]] = []
    for metric in metrics or [None]:
        line: list[object] = [what(row), SHOWN[metric][0] if metric else None]
        for one in (row, other):
            line += _figures(one, metric)
        found.append([*line, ratio_text(all_rows, row, metric) if metric else None, overlay, status])
    return found


def _figures(row: dict[str, Any] | None, metric: str | None) -> list[object]:
    figures = row["metrics"].get(metric) if row else None
    if not figures or not metric:
        return [None, None]
    digits = SHOWN[metric][1]
    return [f"{figures['p50']:,.{digits}f}", f"{figures['min']:,.{digits}f}-{figures['max']:,.{digits}f}"]


def ratio_text(all_rows: list[dict[str, Any]], row: dict[str, Any], metric: str) -> str | None:
    """How many times better than the other server; where runs of both overlap that is no difference to speak of."""
    value = rows.ratio(all_rows, row, metric)
    if value is None:
        return None
    if len(row["runs"]) < 2:
        return f"{value:.3f}x (one run)"
    return f"{value:.3f}x" + ("" if rows.apart(all_rows, row, metric) else " (overlap)")


def _score(row: dict[str, Any]) -> list[list[object]]:
    names = {
        "nll": "NLL, nats a token",
        "mean": "difference, mean",
        "rms": "difference, rms",
        "largest": "largest",
    }
    return [
        [
            what(row), row["provider"], names[metric], f"{figures['p50']:.6f}",
            f"{figures['min']:.6f} to {figures['max']:.6f}", len(row["runs"]), overlay_text(row),
        ]
        for metric, figures in row["metrics"].items()
    ]  # fmt: skip


def lines(document: dict[str, Any]) -> list[str]:
    """What a reader of the tables must know: the servers, the noise of the scored text."""
    found = []
    for server in document["serving"]["servers"]:
        kv = f", KV cache {server['kv_tokens']:,} tokens" if server["kv_tokens"] else ""
        started = (
            f"up after {server['start_s']:.0f} s" if server["start_s"] is not None else "did not come up"
        )
        overlay = server["overlay"]
        off = f"; switched off: {', '.join(overlay['off'])}" if overlay["off"] else ""
        found.append(
            f"{server['name']}: {started}{kv}; overlay {overlay['state']} ({overlay['told_by']}){off}"
        )
    noise = [row for row in document["rows"] if row["workload"] == rows.DIFFERENCE]
    between = [row for row in noise if "itself" not in row["provider"]]
    within = [row for row in noise if "itself" in row["provider"]]
    if between and within:
        most = max(row["metrics"]["rms"]["max"] for row in within)
        found.append(
            f"the scored text differs by {between[0]['metrics']['rms']['p50']:.2e} nats rms between the servers, "
            f"by at most {most:.2e} from run to run of one server"
        )
    return found
