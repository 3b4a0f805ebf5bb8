"""`install --partial`: what is lost is said each time, and what is advised afterwards works for such an install."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_cli.commands import hints, options
from deepinfer_cli.detect import wheel
from deepinfer_cli.overlay import manifest as manifests
from deepinfer_cli.overlay import payload as payloads
from tests.cli.conftest import Cli, install_into, use_payload
from tests.cli.test_doctor import rows
from tests.cli.test_hints import advice, commands, works
from tests.conftest import FakeVllm
from tests.fakes import rewrite

LOST = "WITHOUT combine THE MODEL DOES NOT RUN ON THIS GPU FAMILY"


@pytest.fixture
def partial(
    cli: Cli, fake: FakeVllm, fake_manifest: manifests.Manifest, monkeypatch: pytest.MonkeyPatch
) -> FakeVllm:
    """A vLLM whose symbol of an enable op differs, with the rest installed."""
    ops = tuple(replace(op, group="enable") if op.name == "combine" else op for op in fake_manifest.ops)
    use_payload(payloads.bundled(), replace(fake_manifest, ops=ops), monkeypatch)
    rewrite(fake.cache_utils, "return topk + window", "return topk - window")
    fake.reinstall_record()
    run = install_into(cli, fake, "--partial")
    assert LOST in run.err
    return fake


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--quiet",), ("--json",), ("--force",)])
def test_a_second_install_says_again_what_is_lost(cli: Cli, partial: FakeVllm, more: tuple[str, ...]) -> None:
    run = cli("install", "--target", partial.site, "--arch", "sm80", "--yes", "--partial", *more)
    assert run.code == 0
    assert "op combine is left to stock" in run.err and LOST in run.err


def test_doctor_does_not_call_it_well(cli: Cli, partial: FakeVllm) -> None:
    run = cli("doctor", "--target", partial.site)
    assert rows(run.out)["overlay"] == [
        "problem",
        "installed, without combine",
        "without it the model does not run on this GPU family",
    ]


def _lose_record(fake: FakeVllm) -> None:
    shutil.rmtree(fake.site / ".deepinfer")


def _lose_record_and_edit(fake: FakeVllm) -> None:
    _lose_record(fake)
    rewrite(fake.root / "deepinfer_sm80" / "gate.py", "def device", "def cards")


def _reinstall(fake: FakeVllm) -> None:
    fake.reinstall()
    rewrite(fake.cache_utils, "return topk + window", "return topk - window")
    fake.reinstall_record()


@pytest.mark.parametrize("change", [None, _lose_record, _lose_record_and_edit, _reinstall])
def test_the_next_step_of_status_works(
    cli: Cli, partial: FakeVllm, change: Callable[[FakeVllm], None] | None
) -> None:
    if change is not None:
        change(partial)
    steps = advice(cli, "status", "--target", partial.site)
    assert steps
    for step in steps:
        if step[1] == "verify":
            continue
        assert "--partial" in step
        works(cli, partial.site, step, 0)


def test_a_command_that_was_given_partial_advises_it() -> None:
    where = options.TargetOptions(Path("/a"))
    assert hints.runnable("deepinfer install", where, "sm80", partial=True) == (
        "deepinfer install --target /a --arch sm80 --partial"
    )
    text = "`deepinfer install --partial --arch sm80 --target /a`"
    assert hints.runnable(text, where, "sm80", partial=True) == text
    assert "--partial" not in hints.runnable("deepinfer rollback", where, partial=True)


def test_the_next_step_after_a_fetched_tree_keeps_the_interpreter(
    cli: Cli, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "cached_tree", lambda version, **_: fake.root)
    into = tmp_path / "tree"
    run = cli(
        "install", "--wheel", "0.33.0", "--into", into, "--arch", "sm80", "--yes", "--python", sys.executable
    )
    assert run.code == 0, run.err
    (step,) = commands(run.err)
    assert step == ["deepinfer", "verify", "--target", str(into), "--python", sys.executable]


@pytest.mark.parametrize("command", ["install", "status"])
def test_what_runs_kernels_is_advised_with_the_virtual_environments_own_interpreter(
    cli: Cli, fake: FakeVllm, command: str
) -> None:
    prefix = fake.site.parents[2]
    (prefix / "pyvenv.cfg").write_text("")
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sys.executable)
    run = install_into(cli, fake)
    if command == "status":
        run = cli("status", "--target", fake.site)
    (step,) = commands(run.err)
    assert step[1] == "verify" and step[-2:] == ["--python", str(prefix / "bin" / "python")]
