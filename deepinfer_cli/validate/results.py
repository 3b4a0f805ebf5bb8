"""Result files of `bench`: writing, reading, merging and comparing them. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli import outfile
from deepinfer_cli.errors import FailedError

SCHEMA_VERSION = 1
# rows are the same measurement when these agree
_KEY = ("op", "case", "provider", "codegen", "timing")
# in the environment: op → digest of the code its kernels are made of (see overlay/closure.py)
KERNELS = "kernels"

Row = dict[str, Any]


def commit(digest: str) -> str:
    """The overlay's digest, and the git commit of this checkout where there is one (read without git)."""
    head = Path(__file__).parents[2] / ".git" / "HEAD"
    text = f"payload {digest[:12]}"
    try:
        value = head.read_text().strip()
        if value.startswith("ref: "):
            value = (head.parent / value.removeprefix("ref: ")).read_text().strip()
    except OSError:
        return text
    return f"{text}, git {value[:12]}"


def write(result: dict[str, Any], path: Path) -> None:
    """Writes a result file."""
    outfile.write(path, (json.dumps(result, indent=1) + "\n").encode())


def read(path: Path) -> dict[str, Any]:
    """Reads a result file.

    Raises:
        FailedError: it is none, or of a newer schema.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        # the document of `bench --json` holds the same content
        result = document.get("data", document)
        version, rows = result["schema_version"], result["rows"]
    except OSError as error:
        raise FailedError(
            f"the result file cannot be read: {error.strerror or error}",
            code="result-unreadable",
            hint="name a file that `deepinfer bench --output FILE` wrote",
            paths=(path,),
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FailedError(
            f"{path} is no result file of `deepinfer bench`: {error}",
            code="result-unreadable",
            hint="name a file that `deepinfer bench --output FILE` wrote",
        ) from error
    if version != SCHEMA_VERSION or not isinstance(rows, list):
        raise FailedError(
            f"{path} has schema {version}, this DeepInfer reads {SCHEMA_VERSION}", code="result-unreadable"
        )
    return dict(result)


def key(row: Row) -> str:
    """What makes two rows the same measurement; a baseline is measured once for each architecture of the overlay."""
    arch = None if row["provider"] == "overlay" else row.get("arch")
    return json.dumps([*(row[name] for name in _KEY), arch], sort_keys=True)


def group(row: Row) -> tuple[str, str | None, int | None]:
    """The part of a file that one run replaces: op, the overlay's architecture, limit on shared memory."""
    return row["op"], row.get("arch"), row["case"].get("max_smem")


def merge(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """`old` with the rows of every group (see `group`) that `new` measured replaced, and all rows of a changed op.

    So the code of several architectures, and what fits a limit on shared memory, can stand in one file; and an overlay
    that has grown needs only its new and changed ops measured.

    Raises:
        FailedError: they were measured in different environments, or on different overlays and one does not say of
            which kernels its ops are, so they are no one result.
    """
    if old is None:
        return new
    for name in ("gpu", "driver", "cuda", "torch", "triton", "tilelang", "vllm", "overlay"):
        if name == "overlay" and all(KERNELS in one["environment"] for one in (old, new)):
            continue
        mine, its = (_part(one["environment"], name) for one in (old, new))
        # without a baseline no vLLM is loaded
        if mine != its and not (name == "vllm" and None in (mine, its)):
            raise FailedError(
                f"results of different environments cannot be merged: {name} is {mine} and {its}",
                code="environment-differs",
                hint="write to a new file",
            )
    measured = {group(row) for row in new["rows"]}
    changed = changed_ops(old, new)
    kept = [row for row in old["rows"] if group(row) not in measured and row["op"] not in changed]
    environment = merge_environments(old["environment"], new["environment"])
    if not kept:
        environment["commit"] = new["environment"].get("commit")
    return {**new, "environment": environment, "rows": kept + new["rows"]}


def changed_ops(old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    """The ops of both whose kernels are not the same in them; what `old` has of these is of no code any more."""
    if any(KERNELS not in one["environment"] for one in (old, new)):
        return set()  # of one overlay, then
    mine, its = (one["environment"][KERNELS] for one in (old, new))
    return {row["op"] for row in old["rows"]} & {op for op, digest in its.items() if mine.get(op) != digest}


def merge_environments(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What is known of a machine after a second look; `mma_tflops` keeps the architectures of both, `kernels` the ops."""
    merged = old | {name: value for name, value in new.items() if value is not None}
    commits = [str(one["commit"]) for one in (old, new) if one.get("commit")]
    if commits:
        # rows of both are in the file: of an overlay that has grown, say
        merged["commit"] = "; ".join(dict.fromkeys(part for one in commits for part in one.split("; ")))
    for name in ("mma_tflops", KERNELS):
        both = [one[name] for one in (old, new) if isinstance(one.get(name), dict)]
        if both:
            merged[name] = {key: value for part in both for key, value in part.items()}
    return merged


def _part(environment: dict[str, Any], name: str) -> Any:
    """A value of the environment; `overlay` is the payload's digest, which `commit` begins with."""
    return str(environment.get("commit")).partition(",")[0] if name == "overlay" else environment.get(name)


@dataclass(frozen=True, slots=True)
class Change:
    """One row against the baseline file; `ratio` is new over old latency."""

    row: Row
    before_us: float
    after_us: float

    @property
    def ratio(self) -> float:
        """Above 1 is slower."""
        return self.after_us / self.before_us


def changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[Change], list[Row]]:
    """The overlay's rows that both files measured, and those that only `old` has."""
    measured = {key(row): row for row in new["rows"] if row["latency_us"]}
    both, gone = [], []
    for row in old["rows"]:
        if row["provider"] != "overlay" or not row["latency_us"]:
            continue
        mine = measured.get(key(row))
        if mine is None:
            gone.append(row)
        else:
            both.append(Change(mine, row["latency_us"]["p50"], mine["latency_us"]["p50"]))
    return both, gone


def speedup(rows: Iterable[Row], row: Row, provider: str) -> float | None:
    """How many times faster than `provider` the overlay's `row` is: same op, case and timing, in the same run."""
    if not row["latency_us"]:
        return None
    for other in rows:
        same = all(other.get(name) == row.get(name) for name in ("op", "case", "timing", "arch"))
        if same and other["provider"] == provider and other["latency_us"]:
            return float(other["latency_us"]["p50"] / row["latency_us"]["p50"])
    return None
