"""Processes that are killed in the middle: what they leave, and what the next command makes of it."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.overlay import engine, hook, manifest, payload, undo
from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.payload import Payload
from tests.conftest import FakeVllm, snapshot
from tests.fakes import hooked_paths
from tests.overlay.conftest import Bench

Payloads = Callable[..., Payload]
Snapshot = dict[str, tuple[str, int, str]]

# files that only import together: a mixture of two versions does not
_COUPLED = {
    "__init__.py": '__version__ = "0.1.0"\nfrom . import gate\n\nif gate.VERSION != __version__:\n'
    '    raise ImportError("mixed")\n\n\ndef bind(name, skip=()):\n    pass\n',
    "gate.py": 'VERSION = "0.1.0"\n',
}
MINE = b"# mine\n"


def _coupled(fake_payload: Payloads, version: str, **more: str) -> Payload:
    extra = {name: text.replace("0.1.0", version) for name, text in _COUPLED.items()}
    return fake_payload(
        version, extra=extra | {name.replace("__", "/") + ".py": text for name, text in more.items()}
    )


@pytest.fixture
def two_hooks(fake_vllm: Callable[..., FakeVllm], fake_manifest: Manifest, fake_payload: Payloads) -> Bench:
    """A fake 0.30.0, where two modules are hooked."""
    return Bench(fake_vllm(version="0.30.0"), fake_manifest, _coupled(fake_payload, "0.1.0"))


def _prepare(name: str, bench: Bench, fake_payload: Payloads) -> Callable[[], object]:
    if name == "install":
        return bench.install
    if name == "forced install":
        bench.vllm.cache_utils.write_bytes(bench.vllm.cache_utils.read_bytes() + MINE)
        return lambda: bench.install(force=True)
    if name == "upgrade":
        bench.install(_coupled(fake_payload, "0.0.9", ops__gone="x = 1\n"))
        return lambda: bench.install(_coupled(fake_payload, "0.1.0", ops__fresh="x = 2\n"))
    bench.install()
    if name == "rollback":
        return bench.rollback
    for path in (bench.vllm.cache_utils, bench.vllm.root / "deepinfer_sm80" / "ops" / "gather.py"):
        path.write_bytes(path.read_bytes() + MINE)
    return lambda: bench.rollback(force=True)


SCENARIOS = ("install", "upgrade", "forced install", "rollback", "forced rollback")


def in_child(
    run: Callable[[], object], *, kill_at: int | None = None, undo_kill_at: int | None = None
) -> int:
    """Run in a forked child that SIGKILLs itself before a step; the child's wait status as an exit code."""

    def killer(at: int | None) -> Callable[[str], None]:
        names: list[str] = []

        def step(name: str) -> None:
            names.append(name)
            if at == len(names) - 1:
                os.kill(os.getpid(), signal.SIGKILL)

        return step

    child = os.fork()
    if child == 0:
        code = 70
        try:
            engine._step = killer(kill_at)
            undo._step = killer(undo_kill_at)
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def hooked_modules_import(bench: Bench) -> bool:
    """Whether each hookable module can be imported now, below a stub `vllm`, in a fresh process."""

    def load() -> None:
        sys.dont_write_bytecode = True
        stub = types.ModuleType("vllm")
        stub.__path__ = [str(bench.vllm.root)]
        sys.modules["vllm"] = stub
        importlib.invalidate_caches()
        for path in (bench.vllm.cache_utils, bench.vllm.rocm):
            parts = path.relative_to(bench.site).with_suffix("").parts
            importlib.import_module(".".join(parts))

    return in_child(load) == 0


class Reset:
    """Puts the site back to where a scenario starts."""

    def __init__(self, bench: Bench, copy: Path) -> None:
        self.site, self.copy = bench.site, copy
        shutil.copytree(self.site, copy)

    def __call__(self) -> None:
        shutil.rmtree(self.site)
        shutil.copytree(self.copy, self.site)


def _tree(bench: Bench) -> Snapshot:
    return snapshot(bench.site, ignore=("__pycache__", ".deepinfer"))


def _without_copies(tree: Snapshot) -> Snapshot:
    return {path: value for path, value in tree.items() if not path.startswith(".deepinfer-kept")}


@pytest.mark.parametrize("name", SCENARIOS)
def test_sigkill_at_every_step(two_hooks: Bench, fake_payload: Payloads, tmp_path: Path, name: str) -> None:
    bench = two_hooks
    run = _prepare(name, bench, fake_payload)
    reset = Reset(bench, tmp_path / "copy")
    before = _tree(bench)
    assert in_child(run) == 0
    after = _tree(bench)
    ends = {bench.inspect().state}
    number = 0
    while True:
        reset()
        code = in_child(run, kill_at=number)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert hooked_modules_import(bench), number
        journal = (bench.state_dir / "journal.json").exists()
        if _without_copies(_tree(bench)) not in (before, _without_copies(after)):
            assert journal, number
            assert bench.inspect().state == "interrupted"
        report = bench.recover()
        assert (report.outcome == "nothing") is not journal
        assert _tree(bench) == before or _without_copies(_tree(bench)) == _without_copies(after), number
        assert bench.inspect().state in ends | {"not-installed", "installed", "modified"}
        assert not bench.litter()
        assert not (bench.state_dir / "journal.json").exists()
        assert hooked_modules_import(bench)
        # and the command itself, run again, gets there
        if number % 5 == 0:
            run()
            assert _without_copies(_tree(bench)) == _without_copies(after)
        number += 1
    assert number > 20


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_a_killed_process_leaves_is_told_from_what_others_did(
    two_hooks: Bench, fake_payload: Payloads, tmp_path: Path, name: str
) -> None:
    bench = two_hooks
    run = _prepare(name, bench, fake_payload)
    edited = {one.path for one in bench.inspect().files if one.note == "edited since it was installed"}
    theirs = bench.vllm.root / "deepinfer_sm80" / "theirs.txt"
    reset = Reset(bench, tmp_path / "copy")
    seen, number = set(), 0
    while True:
        reset()
        if in_child(run, kill_at=number) == 0:
            break
        number += 1
        if theirs.parent.is_dir():
            theirs.write_text("a user's")
        found = bench.inspect()
        if found.state != "interrupted":
            continue
        foreign = {note for note in found.notes if note.endswith("is not DeepInfer's")}
        assert foreign <= {"vllm/deepinfer_sm80/theirs.txt is not DeepInfer's"}, number
        assert not any("git apply" in note for note in found.notes)
        seen |= foreign
        for one in found.files:
            assert one.note != "edited since it was installed" or one.path in edited, number
        (kind,) = [note.partition(" was interrupted")[0] for note in found.notes if "interrupted" in note]
        assert kind == ("a rollback" if "rollback" in name else "an install")
    assert number > 20 and seen, "a user's file is still named"


@pytest.mark.parametrize("name", SCENARIOS)
def test_sigkill_at_every_step_of_the_recovery(
    two_hooks: Bench, fake_payload: Payloads, tmp_path: Path, name: str
) -> None:
    bench = two_hooks
    run = _prepare(name, bench, fake_payload)
    before = _tree(bench)
    reset = Reset(bench, tmp_path / "copy")
    names: list[str] = []
    engine_step, engine._step = engine._step, names.append
    try:
        run()
    finally:
        engine._step = engine_step
    middle = max(k for k, step in enumerate(names) if step.startswith("replace "))
    reset()
    assert in_child(run, kill_at=middle) == -signal.SIGKILL
    half = Reset(bench, tmp_path / "half")
    number = 0
    while True:
        half()
        code = in_child(bench.recover, undo_kill_at=number)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert hooked_modules_import(bench), number
        bench.recover()
        assert _tree(bench) == before, number
        assert not (bench.state_dir / "journal.json").exists()
        number += 1
    assert number > 10


@pytest.mark.parametrize("name", SCENARIOS)
def test_sigkill_at_any_moment(two_hooks: Bench, fake_payload: Payloads, tmp_path: Path, name: str) -> None:
    """Not between steps: whenever it happens to hit."""
    bench = two_hooks
    run = _prepare(name, bench, fake_payload)
    reset = Reset(bench, tmp_path / "copy")
    before = _tree(bench)
    run()
    after = _without_copies(_tree(bench))
    for number in range(20):
        reset()
        child = os.fork()
        if child == 0:
            try:
                run()
            finally:
                os._exit(0)
        time.sleep(0.004 + 0.003 * number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        bench.recover()
        assert _tree(bench) == before or _without_copies(_tree(bench)) == after, number
        assert not (bench.state_dir / "journal.json").exists()
        run()
        assert _without_copies(_tree(bench)) == after
        assert not bench.litter()


def bind_as_the_hooks_do(bench: Bench, major: int) -> int:
    """Run each hooked file's own block below a stub `vllm`, on a card of capability `major`.0: 0, or 3 if one raised."""

    def load() -> None:
        sys.dont_write_bytecode = True
        stub, platforms = types.ModuleType("vllm"), types.ModuleType("vllm.platforms")
        stub.__path__ = [str(bench.vllm.root)]
        capability = types.SimpleNamespace(major=major, minor=0)
        vars(platforms)["current_platform"] = types.SimpleNamespace(
            is_cuda=lambda: True, get_device_capability=lambda device_id=0: capability
        )
        sys.modules.update({"vllm": stub, "vllm.platforms": platforms})
        importlib.invalidate_caches()
        for path in (bench.site / name for name in hooked_paths("0.30.0")):
            content = path.read_bytes()
            ast.parse(content)
            block = content[len(hook.strip(content)) :]
            name = ".".join(path.relative_to(bench.site).with_suffix("").parts)
            try:
                exec(compile(block, str(path), "exec"), {"__name__": name})
            except RuntimeError as error:
                assert "interrupted" in str(error)
                os._exit(3)

    return in_child(load)


@pytest.mark.release
@pytest.mark.parametrize("name", ["install", "rollback"])
def test_a_half_overlay_of_a_real_release_imports_and_never_serves(
    name: str, real_release: Callable[..., Path], bench: Bench, fake_payload: Payloads, tmp_path: Path
) -> None:
    site = real_release("0.30.0")
    bench = Bench(FakeVllm(site, "0.30.0", "deepseek_v41"), manifest.load(), payload.bundled())
    run = _prepare(name, bench, fake_payload)
    before = _tree(bench)
    reset = Reset(bench, tmp_path / "copy")
    names: list[str] = []
    engine_step, engine._step = engine._step, names.append
    try:
        run()
    finally:
        engine._step = engine_step
    after = _tree(bench)
    hooks = [
        number
        for number, step in enumerate(names)
        if step.startswith("replace ") and "deepinfer_sm80" not in step
    ]
    hooked_files = [site / path for path in hooked_paths("0.30.0")]
    assert len(hooks) == len(hooked_files) > 10
    refused = 0
    # most steps write one more file of the payload; what differs is before, between and after the hooks
    some = range(0, len(names), len(names) // 6)
    for number in sorted({*some, *hooks, *(number + 1 for number in hooks)}):
        reset()
        assert in_child(run, kill_at=number) == -signal.SIGKILL
        hooked = any(hook.find(path.read_bytes()) for path in hooked_files)
        journal = (bench.state_dir / "journal.json").exists()
        assert bind_as_the_hooks_do(bench, 9) == 0, names[number]
        assert not (hooked and journal) or bind_as_the_hooks_do(bench, 8) == 3, names[number]
        refused += hooked and journal
        bench.recover()
        assert _tree(bench) in (before, after)
    assert refused > 1


def test_edit_after_the_crash_is_kept(two_hooks: Bench) -> None:
    bench = two_hooks
    assert in_child(bench.install, kill_at=_number_of(bench, "verify")) == -signal.SIGKILL
    mine = bench.vllm.cache_utils.read_bytes() + MINE
    bench.vllm.cache_utils.write_bytes(mine)
    report = bench.recover()
    assert report.outcome == "undone"
    assert report.foreign == [bench.vllm.cache_utils.relative_to(bench.site).as_posix()]
    # the block imports a payload that is gone, so it goes; the edit stays, the file as it was is kept
    assert bench.vllm.cache_utils.read_bytes().endswith(MINE)
    assert b"deepinfer" not in bench.vllm.cache_utils.read_bytes()
    assert mine in [Path(path).read_bytes() for path in report.copies]
    assert not (bench.vllm.root / "deepinfer_sm80").exists()
    assert hooked_modules_import(bench)
    assert bench.recover().outcome == "nothing"


def test_edited_payload_file_after_the_crash_is_left(two_hooks: Bench) -> None:
    bench = two_hooks
    assert in_child(bench.install, kill_at=_number_of(bench, "verify")) == -signal.SIGKILL
    gate = bench.vllm.root / "deepinfer_sm80" / "gate.py"
    gate.write_bytes(MINE)
    report = bench.recover()
    assert report.foreign == ["vllm/deepinfer_sm80/gate.py"]
    assert list((bench.vllm.root / "deepinfer_sm80").rglob("*")) == [gate]
    assert gate.read_bytes() == MINE
    assert hooked_modules_import(bench)


def test_edit_after_a_killed_rollback_is_kept(two_hooks: Bench) -> None:
    bench = two_hooks
    bench.install()
    steps: list[str] = []
    engine_step, engine._step = engine._step, steps.append
    try:
        bench.rollback()
    finally:
        engine._step = engine_step
    bench.install()
    last_hook = next(k for k, step in enumerate(steps) if step.startswith("replace vllm/deepinfer_sm80"))
    assert in_child(bench.rollback, kill_at=last_hook + 1) == -signal.SIGKILL
    mine = bench.vllm.cache_utils.read_bytes() + MINE
    bench.vllm.cache_utils.write_bytes(mine)
    assert bench.recover().foreign == [bench.vllm.cache_utils.relative_to(bench.site).as_posix()]
    assert bench.vllm.cache_utils.read_bytes() == mine
    assert bench.inspect().state == "modified"
    assert hooked_modules_import(bench)


def _number_of(bench: Bench, step: str) -> int:
    names: list[str] = []
    engine_step, engine._step = engine._step, names.append
    try:
        bench.install()
    finally:
        engine._step = engine_step
    bench.rollback()
    return names.index(step)


_SCRIPT = """
import sys, time
from pathlib import Path
from deepinfer_cli.detect.vllm import find_target
from deepinfer_cli.overlay import engine
from deepinfer_cli.overlay.rollback import apply_rollback, plan_rollback
from deepinfer_cli.overlay.state import lock

def step(name):
    if name == "verify":
        print("there", flush=True)
        time.sleep(30)

engine._step = step
target = find_target(target=Path(sys.argv[1]))
with lock(target.state_dir):
    apply_rollback(plan_rollback(target))
"""


def _heed_signals() -> None:
    """What `nohup` and a shell's `&` have tests ignore, and children with them."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_from_another_process_restores(bench: Bench, number: signal.Signals) -> None:
    bench.install()
    before = _tree(bench)
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(bench.site)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_signals,
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "there\n"
        assert _tree(bench) != before
        started = time.monotonic()
        child.send_signal(number)
        _, errors = child.communicate(timeout=20)
    assert time.monotonic() - started < 10
    assert child.returncode != 0
    assert "KeyboardInterrupt" in errors or "Terminated" in errors
    assert _tree(bench) == before
    assert bench.inspect().state == "installed"
    assert not (bench.state_dir / "journal.json").exists()
