"""The console script under signals that come while it starts."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_cli import entry, output
from deepinfer_cli.app import app
from deepinfer_cli.errors import ExitCode
from deepinfer_cli.result import ErrorItem, Result

# a signal at the moment that a module is looked for
SHOT = """
import os, sys
class Shot:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Shot())
sys.argv = ["deepinfer", *{arguments!r}]
from deepinfer_cli.entry import entry
entry()
"""
STARTED = ("deepinfer_cli.app", "typer", "deepinfer_cli.commands.options", "deepinfer_cli.commands.rollback")


def shot(module: str, number: int, *arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    code = SHOT.format(module=module, number=int(number), arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
@pytest.mark.parametrize("module", STARTED)
def test_an_interruption_while_it_imports_is_said(module: str, number: int, tmp_path: Path) -> None:
    done = shot(module, number, "rollback", "--target", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error[interrupted]: interrupted\n")


@pytest.mark.parametrize("module", STARTED)
def test_and_as_json(module: str) -> None:
    done = shot(module, signal.SIGINT, "rollback", "--json")
    item = ErrorItem("interrupted", "interrupted")
    wanted = output.document(Result("rollback", exit_code=ExitCode.INTERRUPTED, errors=(item,)))
    assert (done.returncode, json.loads(done.stdout)) == (130, json.loads(wanted))
    assert done.stdout == wanted


def test_what_the_caller_ignores_stays_ignored() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    done = shot("typer", signal.SIGHUP, "--version", preexec_fn=ignore)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["bench", "install", "rollback"])
def test_ctrl_c_at_any_early_moment_has_no_traceback_of_ours(verb: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepinfer_cli", verb, "--target", str(tmp_path)]
    began = time.monotonic()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3
    whole, said = time.monotonic() - began, 0
    for step in range(1, 9):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            time.sleep(whole * step / 9)
            child.send_signal(signal.SIGINT)
            _out, err = child.communicate(timeout=30)
        if child.returncode == 130 and "Traceback" not in err:
            assert err.endswith("error[interrupted]: interrupted\n")
            said += 1
        # Python's own start ends where it loads these
        frames = [line for line in err.splitlines() if "/deepinfer_cli/" in line]
        assert all("__main__.py" in line or "/entry.py" in line for line in frames), err
        assert child.returncode in (3, 130, -signal.SIGINT), err
    assert said


def test_nothing_is_imported_before_the_signals_are_handled() -> None:
    code = (
        "import sys, __future__; before = set(sys.modules); import deepinfer_cli.entry; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"deepinfer_cli", "deepinfer_cli.entry", "_signal"}


def test_every_verb_is_known_to_it() -> None:
    names = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]
    assert sorted(entry.VERBS) == sorted([*names, *(str(group.name) for group in app.registered_groups)])
    assert entry.verb(["--json", "plan", "--gpus", "8"]) == "plan"
    assert entry.verb(["--help"]) == "deepinfer"


def test_it_is_the_console_script() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'deepinfer = "deepinfer_cli.entry:entry"' in text
    assert callable(entry.entry) and importlib.metadata.version("deepinfer")
