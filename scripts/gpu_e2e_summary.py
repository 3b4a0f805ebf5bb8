"""What the documents of `gpu_e2e.py` show: each run's verdict, the planted faults, what the accelerate group gains."""

from __future__ import annotations

from typing import Any

from deepinfer_cli.validate.e2e import compare, drive
from scripts.gpu_e2e_jobs import Job, ending


def summary(jobs: list[Job], documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What must hold, run by run; `ok` if all does.

    Args:
        jobs: all that were to run.
        documents: of those that have run, by name.
    """
    runs = {job.run.name: _verdict(job, documents) for job in jobs}
    result: dict[str, Any] = {
        "schema_version": 1,
        "environment": _environment(documents),
        "runs": runs,
    }
    result["accelerate_against_enable"] = gain(documents)
    result["ok"] = all(verdict["ok"] for verdict in runs.values())
    result["ok"] &= result["accelerate_against_enable"].get("ok", True)
    return result


def _verdict(job: Job, documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    document = documents.get(job.run.name)
    if document is None:
        return {"ok": False, "reason": "no result"}
    findings, reasons = compare.of_run(document), []
    if job.run.plugin is not None or job.refused:
        findings = []
    other = documents.get(job.against or "")
    faults = {}
    if job.against and other is None:
        reasons.append(f"{job.against} has no result")
    elif other is not None and job.run.plugin is not None:
        faults = planted(document, other)
        reasons += [f"{name} was not found" for name, fault in faults.items() if not fault["found"]]
    elif other is not None:
        findings += compare.against(document, other)
    reasons += [finding.reason for finding in findings if not finding.ok][:8]
    if problem := job.check(document):
        reasons.append(problem)
    failed = "" if document["complete"] else drive.why_failed(document)
    reasons = ending(job, failed) + reasons
    return {
        "ok": not reasons,
        "reasons": reasons,
        "version": document["version"],
        "what": job.run.configuration.what,
        "arch": document["arch"],
        "off": document["off"],
        "against": job.against,
        "refused": failed if job.refused else "",
        "seconds": document["seconds"],
        "kv_blocks": (document["answer"] or {}).get("kv_blocks"),
        "kv_tokens": document["kv_tokens"],
        "peak_bytes": {name: phase["peak_bytes"] for name, phase in document["phases"].items()},
        "took_s": {name: phase["took_s"] for name, phase in document["phases"].items()},
        "kernels": len(
            {(kernel["module"], kernel["name"]) for kernel in document["kernels"] if "name" in kernel}
        ),
        "kernel_problems": [kernel["problem"] for kernel in document["kernels"] if "problem" in kernel][:3],
        "bound": sorted({one["op"] for one in _report(document).get("bound", [])}),
        "classes": _classes(document),
        "notable": document["notable"],
        "findings": [_short(finding) for finding in findings],
        **({"faults": faults} if faults else {}),
        **({"times": document["phases"]["times"]} if "times" in document["phases"] else {}),
    }


def _environment(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The GPU and what else the engines ran with."""
    for document in documents.values():
        if document["answer"]:
            answer = document["answer"]
            versions = {name: value for name, value in answer["versions"].items() if name != "vllm"}
            return {"gpu": answer["workers"][0]["gpu"], "python": answer["python"], **versions}
    return {}


def _report(document: dict[str, Any]) -> dict[str, Any]:
    workers = (document["answer"] or {}).get("workers") or [{}]
    return workers[0].get("report") or {}


def _classes(document: dict[str, Any]) -> list[str]:
    workers = (document["answer"] or {}).get("workers") or [{}]
    return list(workers[0].get("classes", []))


def _short(finding: compare.Finding) -> list[Any]:
    """kind, phase, length, mean, rms, p99, largest, ok."""
    numbers = (finding.mean, finding.rms, finding.p99, finding.largest)
    rounded = [None if value is None else round(value, 5) for value in numbers]
    return [finding.kind, finding.phase, finding.length, *rounded, finding.ok]


def planted(document: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """Each planted fault, whether the comparison with stock found it, and by what; `prompts` is the run without any."""
    result = {}
    expected = stock["phases"].get("prompts", {}).get("rows", [])
    for name, phase in document["phases"].items():
        findings = compare.same_lengths("against", name, expected, phase["rows"])
        bad = [finding for finding in findings if not finding.ok]
        found = bool(bad) if name != "prompts" else bool(findings) and not bad
        result[name] = {
            "found": found,
            "by": [f.reason for f in bad][:4],
            "findings": [_short(f) for f in findings],
        }
    return result


def gain(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Step times and KV blocks of both timed runs."""
    both = [documents.get(name) for name in ("timed-accelerate", "timed-enable")]
    if not all(document and document["answer"] for document in both):
        return {}
    fast, slow = (document or {} for document in both)
    result: dict[str, Any] = {
        "kv_blocks": [document["answer"]["kv_blocks"] for document in (fast, slow)],
        "kv_tokens": [document["kv_tokens"] for document in (fast, slow)],
    }
    times = [document["phases"].get("times", {}) for document in (fast, slow)]
    for name in sorted(times[0].keys() & times[1].keys()):
        if name.endswith("_ms"):
            first, second = (time_[name]["median"] for time_ in times)
            result[name] = {"accelerate": first, "enable": second, "ratio": round(second / first, 3)}
    blocks = result["kv_blocks"]
    result["ok"] = bool(all(blocks) and blocks[0] >= blocks[1])
    return result
