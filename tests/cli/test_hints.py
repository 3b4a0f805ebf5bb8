"""Every command that is printed as advice can be pasted: it names the vLLM, the architecture and the right program."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli import app
from deepinfer_cli.commands import hints
from deepinfer_cli.commands.hints import runnable
from deepinfer_cli.commands.options import TargetOptions
from deepinfer_cli.detect import gpu
from tests.cli.conftest import Cli, install_into
from tests.conftest import FakeVllm
from tests.fakes import rewrite

ROOT = Path(__file__).parents[2]
VERB = r"deepinfer (?:export \w+|install|rollback|status|verify|bench|doctor)\b"
WHERE = TargetOptions(Path("/a b"))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("deepinfer rollback", "deepinfer rollback --target '/a b'"),
        ("next: deepinfer verify", "next: deepinfer verify --target '/a b'"),
        ("run `deepinfer install --force`!", "run `deepinfer install --force --target '/a b' --arch sm80`!"),
        ("`deepinfer install --arch sm86`", "`deepinfer install --arch sm86 --target '/a b'`"),
        ("`deepinfer rollback --target X`", "`deepinfer rollback --target X`"),
        ("deepinfer status --help", "deepinfer status --help"),
        ("added by deepinfer rollback", "added by deepinfer rollback"),
        (
            "`deepinfer install --wheel 0.33.0 --into DIR` fetches one",
            "`deepinfer install --wheel 0.33.0 --into DIR --arch sm80` fetches one",
        ),
    ],
)
def test_a_command_in_a_text_is_completed(text: str, want: str) -> None:
    assert runnable(text, WHERE) == want
    assert runnable(want, WHERE) == want


def test_the_architecture_is_the_one_given_or_the_gpus_own(gpus: Callable[..., None]) -> None:
    assert runnable("deepinfer install", TargetOptions(), "sm89") == "deepinfer install --arch sm89"
    gpus((9, 0))
    assert runnable("deepinfer install", TargetOptions()) == "deepinfer install --arch sm80"
    gpus((8, 6))
    assert runnable("deepinfer install", TargetOptions()) == "deepinfer install"


def test_a_gpu_that_cannot_be_asked_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("driver")

    monkeypatch.setattr(gpu, "detect_gpus", broken)
    assert runnable("deepinfer install", TargetOptions()) == "deepinfer install"


def test_the_program_is_the_one_that_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin" / "deepinfer"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bin/deepinfer"])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert runnable("deepinfer verify", TargetOptions()) == "bin/deepinfer verify"
    monkeypatch.setenv("PATH", str(script.parent))
    assert runnable("deepinfer verify", TargetOptions()) == "deepinfer verify"
    module = Path(hints.__file__).parents[1] / "__main__.py"
    monkeypatch.setattr(sys, "argv", [str(module)])
    assert hints.program() == "deepinfer"
    monkeypatch.setenv("PATH", "/usr/bin")
    assert hints.program() == f"{shlex.quote(sys.executable)} -m deepinfer_cli"


def test_every_command_in_a_message_is_written_so_that_it_is_completed() -> None:
    loose = []
    for path in (ROOT / "deepinfer_cli").rglob("*.py"):
        if path.name in {"cli.py", "cli_bench.py", "cli_export.py", "cli_plan.py", "hook.py"}:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if (
                not isinstance(node, ast.Constant)
                or not isinstance(node.value, str)
                or id(node) in documentation
            ):
                continue
            found = len(re.findall(VERB, node.value))
            if found != len(hints._COMMAND.findall(node.value)):
                loose.append(f"{path.name}: {node.value}")
    assert loose == []


def commands(text: str) -> list[list[str]]:
    """What the output advises to run."""
    found = re.findall(rf"(?:`|^hint: |^next: |To run it: )({VERB}[^`\n]*)", text, re.MULTILINE)
    return [shlex.split(each) for each in found if "--wheel" not in each and "DIR" not in each]


def advice(cli: Cli, *arguments: object) -> list[list[str]]:
    run = cli(*arguments)
    return commands(run.out + run.err)


def works(cli: Cli, site: Path, words: list[str], *codes: int) -> None:
    """The command names this vLLM, and gets as far as looking at it."""
    assert str(site) in words
    more = ["--dry-run"] if words[1] in {"install", "rollback"} else []
    run = cli(*words[1:], *more)
    assert run.code in codes, run.err


def test_advice_about_a_vllm_without_the_overlay_works(cli: Cli, fake: FakeVllm) -> None:
    (step,) = advice(cli, "status", "--target", fake.site)
    works(cli, fake.site, step, 0)
    shown = advice(cli, "verify", "--level", "static", "--target", fake.site)
    assert ["deepinfer", "install", "--target", str(fake.site), "--arch", "sm80"] in shown
    install_into(cli, fake)
    (step,) = advice(cli, "status", "--target", fake.site)
    assert step == ["deepinfer", "verify", "--target", str(fake.site)]
    with fake.cache_utils.open("a", encoding="utf-8") as file:
        file.write("# mine\n")
    for step in advice(cli, "status", "--target", fake.site):
        works(cli, fake.site, step, 0)


def test_a_vllm_that_is_not_served_is_not_said_to_be_next(cli: Cli, fake: FakeVllm) -> None:
    rewrite(fake.cache_utils, "def combine_indices", "def combine_them")
    step = commands(cli("status", "--target", fake.site).err)[-1]
    assert "--partial" in step
    works(cli, fake.site, step, 0)
    rewrite(fake.cache_utils, "def gather_cache", "def gather_them")
    assert "next:" not in cli("status", "--target", fake.site).err


def test_the_live_level_does_not_advise_itself(cli: Cli, fake: FakeVllm) -> None:
    run = cli("verify", "--level", "live", "--target", fake.site, "--python", sys.executable)
    assert run.code == 3
    assert "hint: name with --python the interpreter" in run.err


def test_main_names_the_program_in_usage_errors(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "deepinfer"
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert f"hint: {script} status --help" in cli("status", "--nope").err
    assert callable(app.main)
