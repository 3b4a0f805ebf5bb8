"""Starts a child for a run, follows it, and gathers all it left into one document."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from deepinfer_cli.validate import runner
from deepinfer_cli.validate.e2e.plan import Run

CHILD = Path(__file__).with_name("child.py")
LOG = "child.log"
TAIL_LINES = 40
_KV_TOKENS = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_NOTABLE = re.compile(r"DeepInfer |Decoder SWA bounded replay|Using .* backend|kernels are not recorded")

# what a child says: the event as it comes
OnEvent = Callable[[Run, dict[str, Any]], None]


def run(
    run: Run,
    python: Path,
    folder: Path,
    timeout_s: float,
    on_event: OnEvent | None = None,
    crew: runner.Crew | None = None,
) -> dict[str, Any]:
    """Runs one child to its end.

    Args:
        python: the interpreter that serves vLLM.
        folder: a new folder for the request, the log and all results of this run.
        timeout_s: for the whole child; it and everything it started are killed then.

    Returns:
        A document (see `document`); never raises for what the child does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = folder / "request.json"
    request.write_text(json.dumps(run.request(folder)), encoding="utf-8")
    crew, began = crew or runner.Crew(), time.monotonic()
    events: list[dict[str, Any]] = []
    with (folder / LOG).open("wb") as log:
        process = crew.start(
            [str(python), str(CHILD), str(request)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=run.environment(), cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        ended = "killed"
        try:
            for event in _listen(process, began + timeout_s):
                events.append(event)
                if on_event is not None:
                    on_event(run, event)
            late = time.monotonic() >= began + timeout_s
            ended = f"not done within {timeout_s:g} s" if late else _ended(process)
        finally:
            crew.end(process)
    shutil.rmtree(folder / "model", ignore_errors=True)
    return document(run, events, folder, ended, round(time.monotonic() - began, 1))


def _listen(process: subprocess.Popen[bytes], until: float) -> Iterator[dict[str, Any]]:
    """Events until the child closes its channel or the time is over."""
    lines: queue.Queue[bytes | None] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    while (left := until - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            return
        if line is None:
            return
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                yield event


def _pump(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in stream:
            lines.put(line)
    lines.put(None)


def _ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return "closed its channel and did not end"
    return "" if code == 0 else runner.exit_words(code)


def document(
    run: Run, events: list[dict[str, Any]], folder: Path, ended: str, seconds: float
) -> dict[str, Any]:
    """What one child said and left, as one JSON object.

    Returns:
        name, arch, generated (Triton made code for arch), off (ops left to stock), engine, answer (None where no
        engine started), phases (by name), errors, seconds, steps (name and when it began), complete (every phase has
        a result), ended (empty, or how the child ended instead), parameters (name, shape, dtype and kind, by model
        and rank), kernels, kv_tokens, notable (log lines), log (its path) and tail (the log's end, where it failed).
    """
    phases = {event["name"]: event for event in events if event["event"] == "phase"}
    answer = next((event for event in events if event["event"] == "answer"), None)
    wanted = {str(phase["name"]) for phase in run.configuration.phases}
    errors = [event for event in events if event["event"] == "error"]
    log = folder / LOG
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    done = any(event["event"] == "done" for event in events)
    complete = done and not ended and wanted <= phases.keys() and answer is not None and not errors
    return {
        "name": run.name,
        "arch": run.arch,
        "generated": run.generate,
        "off": list(run.off),
        "engine": run.engine(),
        "answer": answer,
        "phases": phases,
        "errors": errors,
        "seconds": seconds,
        "steps": [[event["step"], event["seconds"]] for event in events if event["event"] == "step"],
        "complete": complete,
        "ended": ended if ended or done else "ended without a word",
        "parameters": _parameters(folder),
        "kernels": _kernels(folder / "kernels.jsonl"),
        "kv_tokens": kv_tokens(text),
        "notable": _notable(text),
        "log": str(log),
        "tail": [] if complete else text.splitlines()[-TAIL_LINES:],
    }


def _parameters(folder: Path) -> dict[str, list[list[Any]]]:
    """`target-0` → parameters of that model on that rank; of several processes of a rank the first."""
    found: dict[str, list[list[Any]]] = {}
    for path in sorted(folder.glob("parameters-*.json")):
        key = "-".join(path.stem.split("-")[1:3])
        found.setdefault(key, json.loads(path.read_text(encoding="utf-8")))
    return found


def _kernels(path: Path) -> list[dict[str, Any]]:
    """Each specialization once; one that a launch built too counts as launched.

    One that could not be described has a `problem` alone.
    """
    found: dict[str, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        with contextlib.suppress(ValueError):
            kernel = json.loads(line)
            key = json.dumps(
                {name: value for name, value in kernel.items() if name != "warmup"}, sort_keys=True
            )
            if key not in found or not kernel.get("warmup"):
                found[key] = kernel
    return sorted(found.values(), key=lambda kernel: (kernel.get("module", ""), kernel.get("name", "")))


def kv_tokens(log: str) -> int | None:
    """The size of the KV cache that vLLM wrote to its log last, in tokens; None where it has not."""
    found = _KV_TOKENS.findall(log)
    return int(found[-1].replace(",", "")) if found else None


def _notable(log: str) -> list[str]:
    """Lines that say what was chosen, each once."""
    return list(dict.fromkeys(line.strip()[:300] for line in log.splitlines() if _NOTABLE.search(line)))[:30]


def why_failed(document: dict[str, Any]) -> str:
    """One sentence about a run that is not complete: its first exception, or how it ended."""
    for error in document["errors"]:
        first = next((line for line in str(error["message"]).splitlines() if line.strip()), "no message")
        text = f"{error['step']}: {error['kind']}: {first.strip()[:400]}"
        last = [line.strip() for line in str(error["message"]).splitlines() if line.strip()][-1:]
        if last and last[0][:400] not in text:
            text += f" … {last[0][:400]}"
        return f"{text} ({error['place']})" if error.get("place") else text
    missing = "" if document["answer"] else ", before its engine had started"
    return f"{document['ended'] or 'a phase has no result'}{missing}"
