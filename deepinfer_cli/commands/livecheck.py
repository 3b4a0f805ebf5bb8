"""After an install: a child process of the target's interpreter says which ops are bound there."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_cli.detect.gpu import GpuReport
from deepinfer_cli.detect.target import Target, TargetKind
from deepinfer_cli.overlay.record import Record
from deepinfer_cli.render import joined

_TIMEOUT_S = 300
_NO_PYTHON = {
    TargetKind.TREE: "a tree has no interpreter of its own",
    TargetKind.CHECKOUT: "a checkout has no interpreter of its own",
    TargetKind.ENVIRONMENT: "--target does not say which interpreter is this environment's",
}
_LIVE = Path(__file__).parent.parent / "validate" / "live.py"
# importing it starts CUDA in the child
_LEFT_OUT = "amd"


@dataclass(frozen=True, slots=True)
class Check:
    """What the child process found.

    Attributes:
        sentence: for people.
        failed: the overlay is on disk and does not bind.
        data: for the JSON document.
    """

    sentence: str
    failed: bool = False
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def checked(self) -> bool:
        """Whether the child process could tell."""
        return bool(self.data.get("checked"))


def not_asked() -> Check:
    """The result where the check was switched off."""
    return _unchecked("--no-verify")


def check(target: Target, record: Record, gpus: GpuReport) -> Check:
    """Imports the hooked modules in the target's interpreter, where that is possible."""
    if target.python is None:
        return _unchecked(f"{_NO_PYTHON[target.kind]}; --python names one that has vLLM's requirements")
    if not any(gpu.served for gpu in gpus.gpus):
        return _unchecked("no sm80, sm86 or sm89 GPU in this machine")
    request = {
        "parent": str(target.parent),
        "layout": target.layout,
        "modules": _modules(record),
        "expect": list(record.ops),
        "skipped": list(record.skip),
        "mode": "bound",
    }
    try:
        done = subprocess.run(
            [str(target.python), str(_LIVE)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        return _unchecked(f"{target.python}: {error}")
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return _unchecked(f"{target.python} gave no answer: {last[0]}")
    return read(answer)


def read(answer: dict[str, Any]) -> Check:
    """The child's answer as a result."""
    error = answer["error"]
    if error and error["stage"] == "import":
        return _unchecked(f"this vLLM cannot be imported here ({error['kind']}: {error['message']})", answer)
    if answer["report"] and not answer["report"].get("enabled", True):
        # with mixed cards the child may see another one first
        return _unchecked("that process sees no SM8x device first, or DEEPINFER_DISABLE is set", answer)
    problems = list(answer["problems"]) + ([error["message"]] if error else [])
    if problems:
        return Check(
            f"not bound: {'; '.join(problems)}", True, {"checked": True, "ok": False, "answer": answer}
        )
    ops = joined(sorted({one["op"] for one in answer["report"]["bound"]}))
    return Check(
        f"checked in a child process: {ops} bound", False, {"checked": True, "ok": True, "answer": answer}
    )


def _unchecked(reason: str, answer: dict[str, Any] | None = None) -> Check:
    sentence = f"not checked that the ops are bound: {reason}"
    return Check(sentence, False, {"checked": False, "reason": reason, "answer": answer})


def _modules(record: Record) -> list[str]:
    names = [entry.path.removesuffix(".py").split("/") for entry in record.files if entry.owner == "hook"]
    return [".".join(parts) for parts in names if _LEFT_OUT not in parts]
