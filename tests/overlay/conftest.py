"""What the tests of the overlay engine share: one fake vLLM with an install, a rollback and a recovery at hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deepinfer_cli.detect.vllm import Target
from deepinfer_cli.overlay import engine
from deepinfer_cli.overlay import payload as payloads
from deepinfer_cli.overlay.inspect import Inspection, inspect
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.payload import Payload
from deepinfer_cli.overlay.plan import Plan, plan_install
from deepinfer_cli.overlay.record import Record, read_record
from deepinfer_cli.overlay.recovery import RecoveryReport, recover
from deepinfer_cli.overlay.rollback import RollbackReport, apply_rollback, plan_rollback
from deepinfer_cli.overlay.state import lock
from deepinfer_cli.overlay.transaction import apply_install
from tests.conftest import FakeVllm


@dataclass
class Bench:
    """A fake vLLM and what one does with it; installs and rolls back as the commands do, under the lock."""

    vllm: FakeVllm
    manifest: Manifest
    payload: Payload

    @property
    def site(self) -> Path:
        return self.vllm.site

    @property
    def target(self) -> Target:
        return self.vllm.target()

    @property
    def state_dir(self) -> Path:
        return self.target.state_dir

    def plan(self, payload: Payload | None = None, *, force: bool = False) -> Plan:
        record = read_record(self.state_dir)
        return plan_install(self.target, payload or self.payload, self.manifest, record=record, force=force)

    def install(self, payload: Payload | None = None, *, force: bool = False) -> Record:
        with lock(self.state_dir):
            recover(self.site, self.state_dir)
            return apply_install(self.plan(payload, force=force), archs=("sm80",))

    def rollback(self, *, force: bool = False, where: Path | None = None) -> RollbackReport:
        state_dir = where / ".deepinfer" if where else self.state_dir
        with lock(state_dir):
            recover(where or self.site, state_dir)
            return apply_rollback(plan_rollback(where or self.target), force=force)

    def recover(self) -> RecoveryReport:
        with lock(self.state_dir):
            return recover(self.site, self.state_dir)

    def inspect(self) -> Inspection:
        return inspect(self.target)

    def litter(self) -> list[str]:
        """Temp files and probes that a transaction must not leave."""
        return [str(path) for path in self.site.rglob("*") if "deepinfer-" in path.name and path.is_file()]

    def kept(self) -> dict[str, bytes]:
        """Path → bytes of all copies kept beside vllm."""
        folders = self.site.glob(".deepinfer-kept-*")
        return {
            path.relative_to(self.site).as_posix(): path.read_bytes()
            for folder in folders
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk; that the engine asks for it has a test of its own."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def bench(
    fake_vllm: Callable[..., FakeVllm], fake_manifest: Manifest, fake_payload: Callable[..., Payload]
) -> Bench:
    """An untouched fake vLLM 0.33.0 and a small payload."""
    return Bench(fake_vllm(), fake_manifest, fake_payload())


@pytest.fixture
def bundled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small payload is the one that this DeepInfer came with."""
    monkeypatch.setattr(payloads, "bundled", lambda: bench.payload)


@dataclass
class Steps:
    """The steps of transactions and undos that ran, and an action at one of them."""

    names: list[str] = field(default_factory=list)
    action: Callable[[str], object] | None = None
    at: int | None = None
    prefix: str = ""

    def called(self, name: str) -> None:
        self.names.append(name)
        here = name.startswith(self.prefix) if self.prefix else self.at == len(self.names) - 1
        if self.action and here:
            self.action(name)

    def arm(self, at: int | None, action: Callable[[str], object] | None) -> None:
        """Run `action` before step number `at`, counted from now."""
        self.names.clear()
        self.at, self.action, self.prefix = at, action, ""

    def on(self, prefix: str, action: Callable[[str], object]) -> None:
        """Run `action` before each step whose name starts with `prefix`."""
        self.names.clear()
        self.action, self.prefix = action, prefix


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Watches the step hook of the engine; recoveries are watched in a list of their own."""
    found = Steps()
    monkeypatch.setattr(engine, "_step", found.called)
    return found
