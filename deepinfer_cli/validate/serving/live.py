"""Whether the overlay was live in a server's processes, by what each of them wrote to the server's log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cli.validate.e2e.drive import kv_tokens

LIVE, OFF, UNKNOWN = "live", "off", "unknown"

# vLLM's logger puts the process before the line: `(EngineCore_DP0 pid=123) INFO ...`
_LINE = re.compile(
    r"DeepInfer (?P<version>\S+): (?P<arch>sm\d+)(?P<forced> \(forced\))?; bound (?P<bound>[^;]*?)"
    r"(?:; not installed: (?P<skipped>[^;]*?))?(?:; switched off: (?P<off>[^;]*?))? \((?P<module>[\w.]+)\)\s*$"
)
# said by a process itself when it makes its first attention layer of V4.1
_CHOSEN = re.compile(r"\] DeepInfer: ")
_PROCESS = re.compile(r"\((?P<name>[A-Za-z_]+)[^()]*? pid=(?P<pid>\d+)\)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# who computes, the first that there is: workers of their own, else the engine
_COMPUTING = ("Worker", "EngineCore")


@dataclass(frozen=True, slots=True)
class Overlay:
    """What a server's log says of the overlay.

    Attributes:
        state: `live`, `off` or `unknown`.
        told_by: what that was read from, in words.
        bound: ops bound in every computing process.
        off: ops that were switched off.
        arch: whose kernels, and `forced` onto another card.
        pids: the processes that compute and said so.
    """

    state: str
    told_by: str
    bound: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    arch: str | None = None
    forced: bool = False
    pids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For a row."""
        return {
            "state": self.state, "told_by": self.told_by, "bound": list(self.bound), "off": list(self.off),
            "arch": self.arch, "forced": self.forced, "processes": len(self.pids),
        }  # fmt: skip


def unknown(why: str) -> Overlay:
    """Of a process that cannot be asked."""
    return Overlay(UNKNOWN, why)


def of_log(lines: Iterable[str]) -> Overlay:
    """What the processes that compute have said.

    A process says anew what it has bound as modules come in: its last line counts. vLLM may fork its engine from a
    process that has said so already: then the engine says only which attention class it takes, and has bound the same.
    """
    said: dict[int, re.Match[str]] = {}
    chosen: set[int] = set()
    names: dict[int, set[str]] = {}
    for line in lines:
        line = _COLOUR.sub("", line)
        process = _PROCESS.search(line)
        if process is None:
            continue
        # a process may be renamed after its first lines
        names.setdefault(int(process["pid"]), set()).add(process["name"])
        if found := _LINE.search(line):
            said[int(process["pid"])] = found
        elif _CHOSEN.search(line):
            chosen.add(int(process["pid"]))
    kind, pids = _computing(names)
    parents = [found for pid, found in said.items() if pid not in pids]
    for pid in pids:
        if pid not in said and pid in chosen and parents:
            said[pid] = parents[-1]
    if not pids:
        return unknown("the log names no process that computes")
    silent = [pid for pid in pids if pid not in said]
    if silent:
        told = f"no line of the overlay from process {silent[0]} ({kind})"
        return Overlay(OFF, told) if len(silent) == len(pids) else unknown(told)
    return _together([said[pid] for pid in pids], pids, kind)


def _computing(names: dict[int, set[str]]) -> tuple[str, tuple[int, ...]]:
    for kind in _COMPUTING:
        pids = tuple(sorted(pid for pid, own in names.items() if any(kind in name for name in own)))
        if pids:
            return kind, pids
    return "", ()


def _together(lines: list[re.Match[str]], pids: tuple[int, ...], kind: str) -> Overlay:
    bound = set.intersection(*(_names(line["bound"]) for line in lines))
    off = set.union(*(_names(line["off"]) for line in lines))
    return Overlay(
        LIVE if bound else OFF,
        f"the log of {kind}",
        tuple(sorted(bound)),
        tuple(sorted(off)),
        lines[0]["arch"],
        bool(lines[0]["forced"]),
        pids,
    )


def _names(text: str | None) -> set[str]:
    return {name.strip() for name in (text or "").split(",")} - {"", "nothing"}


def read(log: Path) -> tuple[Overlay, int | None]:
    """What a server's log says of the overlay, and its KV cache in tokens (None where it does not say)."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return of_log(text.splitlines()), kv_tokens(text)
