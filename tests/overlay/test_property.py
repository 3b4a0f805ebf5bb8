"""Random sequences of commands, edits, reinstalls and crashes: no byte of the user's is lost, no half state stays."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer_cli.errors import DeepInferError
from deepinfer_cli.overlay import engine, hook, undo
from deepinfer_cli.overlay.files import hash_of
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.payload import Payload
from deepinfer_cli.overlay.record import read_record
from tests.conftest import FakeVllm, sources
from tests.overlay.conftest import Bench

CRASH = st.one_of(st.none(), st.integers(0, 45))
FILES = st.sampled_from(["cache_utils", "rocm", "gate.py", "ops/gather.py", "__init__.py", "extra.py"])
VERSIONS = st.sampled_from(["0.30.0", "0.33.0", "0.34.0"])


class Killed(BaseException):
    """Stands for SIGKILL: nothing is restored after it."""


class Machine(RuleBasedStateMachine):
    """A fake vLLM, a user and DeepInfer."""

    # set by the test
    make: Callable[[], Bench]
    payloads: tuple[Payload, ...]

    def __init__(self) -> None:
        super().__init__()
        self.bench = self.make()
        self.version = self.bench.vllm.version
        self.edits = itertools.count()
        # path → what the user last wrote there
        self.live: dict[Path, bytes] = {}
        self.touched: set[Path] = set()
        self.crashed = False

    def teardown(self) -> None:
        try:
            self._command(lambda: self.bench.rollback(force=True), None)
            if not self.refused:
                self._check_gone()
            self._check_bytes()
        finally:
            shutil.rmtree(self.bench.site)

    def _path(self, name: str) -> Path:
        root = self.bench.vllm.root
        hooked = {"cache_utils": self.bench.vllm.cache_utils, "rocm": self.bench.vllm.rocm}
        return hooked.get(name, root / "deepinfer_sm80" / name)

    @rule(name=FILES, whole=st.booleans())
    def edit(self, name: str, whole: bool) -> None:
        """The user appends a line to a file, or writes it anew."""
        path = self._path(name)
        if not path.parent.is_dir():
            return
        line = f"# edit {next(self.edits)}\n".encode()
        before = path.read_bytes() if path.exists() and not whole else b""
        path.write_bytes(before + line)
        self.live[path] = before + line
        self.touched.add(path)

    @rule(name=st.sampled_from(["cache_utils", "rocm"]))
    def restore(self, name: str) -> None:
        """The user puts vLLM's own file back."""
        path = self._path(name)
        text = sources(self.version)[path.relative_to(self.bench.vllm.root).as_posix()]
        path.write_text(text, encoding="utf-8")
        self.live.pop(path, None)
        self.touched.add(path)

    @rule(version=VERSIONS)
    def reinstall(self, version: str) -> None:
        """`pip install --force-reinstall`, of this or another version."""
        self.bench.vllm.reinstall(version)
        self.version = version
        for name in ("cache_utils", "rocm"):
            self.live.pop(self._path(name), None)
            self.touched.add(self._path(name))

    @rule(number=st.integers(0, 1), force=st.booleans(), crash=CRASH)
    def install(self, number: int, force: bool, crash: int | None) -> None:
        self._command(lambda: self.bench.install(self.payloads[number], force=force), crash)
        if not self.crashed and not self.refused:
            assert self.bench.inspect().state == "installed"
            record = read_record(self.bench.state_dir)
            assert record and record.payload_digest == self.payloads[number].digest
            self.touched = {path for path in self.touched if path.name == "extra.py"}

    @rule(force=st.booleans(), crash=CRASH)
    def rollback(self, force: bool, crash: int | None) -> None:
        self._command(lambda: self.bench.rollback(force=force), crash)
        if not self.crashed and not self.refused:
            self._check_gone()

    @precondition(lambda self: self.crashed)
    @rule(crash=CRASH)
    def recover(self, crash: int | None) -> None:
        self._command(self.bench.recover, crash)

    def _command(self, run: Callable[[], object], crash: int | None) -> None:
        count = itertools.count()

        def step(name: str) -> None:
            if next(count) == crash:
                raise Killed(name)

        engine._step = undo._step = step
        self.crashed = self.refused = False
        try:
            run()
        except Killed:
            self.crashed = True
        except DeepInferError as error:
            assert error.code in {
                "file-drift",
                "not-verifiable",
                "overlay-conflict",
                "vllm-version-unsupported",
            }
            self.refused = True
        if not self.crashed:
            self._check_whole()

    def _check_gone(self) -> None:
        """After a rollback: no hook, and in our folder only what is the user's."""
        assert not (self.bench.state_dir).exists()
        for path in self.bench.vllm.root.rglob("*.py"):
            if "deepinfer_sm80" in path.parts:
                assert path in self.live
            else:
                assert not hook.find(path.read_bytes())

    def _check_whole(self) -> None:
        """No half state: either a record and all of its files, or none; what the user touched apart."""
        bench = self.bench
        assert not (bench.state_dir / "journal.json").exists()
        assert not bench.litter()
        record = read_record(bench.state_dir)
        entries = record.files if record else ()
        for entry in entries:
            path = bench.site / entry.path
            assert path in self.touched or hash_of(path) == entry.applied_sha256, path
        ours = {bench.site / entry.path for entry in entries}
        for path in (bench.vllm.root / "deepinfer_sm80").rglob("*"):
            assert path.is_dir() or path in ours or path in self.touched, path
        if any(hook.find(path.read_bytes()) for path in (bench.vllm.cache_utils, bench.vllm.rocm)):
            assert (bench.vllm.root / "deepinfer_sm80" / "__init__.py").exists()

    @invariant()
    def _check_bytes(self) -> None:
        """What the user wrote is at its file (with or without our block), or a copy or backup of it exists."""
        if not self.live:
            return
        saved = set(self.bench.kept().values())
        backups = self.bench.state_dir / "backups"
        saved |= {path.read_bytes() for path in backups.rglob("*") if path.is_file()}
        for path, content in self.live.items():
            now = path.read_bytes() if path.exists() else None
            assert now == content or content in saved or (now and content in hook.originals(now)), path


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost(
    tmp_path: Path,
    fake_vllm: Callable[..., FakeVllm],
    fake_manifest: Manifest,
    fake_payload: Callable[..., Payload],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    restore = engine._restore
    monkeypatch.setattr(
        engine, "_restore", lambda work, error: None if isinstance(error, Killed) else restore(work, error)
    )
    for module in (engine, undo):
        monkeypatch.setattr(module, "_step", lambda name: None)
    payloads = (
        fake_payload("0.0.9", extra={"ops/gone.py": "x = 1\n"}),
        fake_payload("0.1.0", extra={"new/fresh.py": ""}),
    )
    count = itertools.count()

    def make() -> Bench:
        return Bench(fake_vllm(tmp_path / f"site-{next(count)}"), fake_manifest, payloads[0])

    machine = type("Machine", (Machine,), {"make": staticmethod(make), "payloads": payloads})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=15,
            deadline=None,
            derandomize=seed == 0,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
