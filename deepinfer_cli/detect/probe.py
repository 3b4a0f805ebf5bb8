"""Asking an interpreter where its vLLM is, in a child process that does not import vLLM."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from deepinfer_cli.errors import UnsupportedError

TIMEOUT_S = 60
_SAID_CHARACTERS = 160
_MARK = "deepinfer-probe:"

# the folder the user stands in is no part of an environment; Python 3.10 has no -P, so it is dropped here
_SCRIPT = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import importlib.metadata, importlib.util, json, os
try:
    spec = importlib.util.find_spec("vllm")
except Exception as error:
    spec, problem = None, repr(error)
else:
    problem = None
seen = [entry for entry in sys.path if os.path.isdir(os.path.join(entry, "vllm"))]
states = [entry for entry in sys.path if os.path.isdir(os.path.join(entry, ".deepinfer"))]
infos = []
for item in importlib.metadata.distributions(name="vllm"):
    infos.append(str(item._path))
print("deepinfer-probe:" + json.dumps({
    "origin": spec and spec.origin,
    "folders": list(spec.submodule_search_locations or ()) if spec else [],
    "problem": problem,
    "seen": seen,
    "states": states,
    "infos": infos,
    "version": ".".join(map(str, sys.version_info[:3])),
    "pythonpath": os.environ.get("PYTHONPATH", ""),
}))
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """What an interpreter says about its vLLM.

    Attributes:
        python: the interpreter, links kept (a venv's python is one).
        version: its version.
        origin: `vllm/__init__.py` as it would be imported, None for a namespace package or nothing.
        folders: where it would look for vLLM's submodules.
        seen: every path entry with a `vllm` folder, in order.
        states: every path entry with a `.deepinfer` folder.
        infos: the metadata folders of distributions named vllm.
        pythonpath: the entries of PYTHONPATH.
    """

    python: Path
    version: str
    origin: Path | None
    folders: tuple[Path, ...]
    seen: tuple[Path, ...]
    states: tuple[Path, ...]
    infos: tuple[Path, ...]
    pythonpath: tuple[str, ...]


def probe(python: Path | None = None) -> Probe:
    """Ask `python`, default the running interpreter.

    Raises:
        UnsupportedError: it is missing, no Python, too old, or does not start.
    """
    executable = _executable(python)
    try:
        done = subprocess.run(
            [str(executable), "-c", _SCRIPT],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise _unusable(executable, f"did not answer within {TIMEOUT_S} s") from error
    except OSError as error:
        raise _unusable(executable, f"cannot be started: {error.strerror or error}") from error
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not answers:
        lines = done.stderr.strip().splitlines()
        # what is no Python may repeat the whole script
        said = shorten(lines[-1], _SAID_CHARACTERS) if lines else "no answer"
        raise _unusable(executable, f"is no working Python: {said}")
    data = json.loads(answers[-1].removeprefix(_MARK))
    if data["problem"]:
        raise _unusable(executable, f"cannot look for vLLM: {data['problem']}")
    return Probe(
        python=executable,
        version=data["version"],
        origin=Path(data["origin"]) if data["origin"] else None,
        folders=tuple(Path(item) for item in data["folders"]),
        seen=tuple(Path(item) for item in data["seen"]),
        states=tuple(Path(item) for item in data["states"]),
        infos=tuple(Path(item) for item in data["infos"]),
        pythonpath=tuple(item for item in data["pythonpath"].split(":") if item),
    )


def _executable(python: Path | None) -> Path:
    if python is None:
        return Path(sys.executable)
    if len(python.parts) == 1 and not python.exists() and (found := shutil.which(str(python))):
        return Path(found)
    python = python.absolute()
    if python.is_dir():
        inside = python / "bin" / "python"
        hint = f"did you mean --python {shlex.quote(str(inside))}?" if inside.exists() else None
        raise _unusable(python, "is a folder", hint)
    if not python.exists():
        raise _unusable(python, "does not exist")
    return python


def _unusable(python: Path, what: str, hint: str | None = None) -> UnsupportedError:
    return UnsupportedError(
        f"the interpreter {python} {what}",
        code="python-unusable",
        hint=hint or "pass --python the interpreter that runs vLLM, such as .venv/bin/python",
    )
