"""The GPU's lock: one worker at a time, and the others say that they wait."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from deepinfer_cli.validate import turns
from deepinfer_cli.validate.turns import Turns


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch):
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_a_second_worker_waits_and_says_so(tmp_path: Path):
    events, done = [], threading.Event()
    first, second = (Turns(into.append, tmp_path / "lock") for into in ([], events))

    def work():
        with second.mine():
            done.set()

    with first.mine():
        thread = threading.Thread(target=work)
        thread.start()
        assert not done.wait(0.2) and events == [{"event": "waiting"}]
    thread.join(10)
    assert done.is_set() and events[-1] == {"event": "turn"}


def test_a_worker_lets_others_have_their_turn_while_it_compiles(tmp_path: Path):
    first, second = (Turns(lambda event: None, tmp_path / "lock") for _ in range(2))
    with first.mine():
        with first.others():
            assert not first.held
            with second.mine():
                assert second.held
        assert first.held
    assert not first.held
    with first.others():
        assert not first.held


def test_a_turn_ends_with_an_error(tmp_path: Path):
    first, second = (Turns(lambda event: None, tmp_path / "lock") for _ in range(2))
    with pytest.raises(ValueError), first.mine():
        raise ValueError
    with second.mine():
        pass


def test_what_tilelang_compiles_for_vllm_takes_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class JITImpl:
        def compile(self, *args, **kwargs):
            return mine.held, args, kwargs

    module = ModuleType("tilelang.jit")
    module.JITImpl = JITImpl
    monkeypatch.setitem(sys.modules, "tilelang", ModuleType("tilelang"))
    monkeypatch.setitem(sys.modules, "tilelang.jit", module)
    mine = Turns(lambda event: None, tmp_path / "lock")
    mine.while_tilelang_compiles()
    with mine.mine():
        assert JITImpl().compile(1, hidden=5) == (False, (1,), {"hidden": 5})
        assert mine.held


def test_each_gpu_has_its_own_lock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert turns.lock_path().name.startswith("deepinfer-gpu-0-")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a/2,3")
    assert turns.lock_path().name.startswith("deepinfer-gpu-GPU-1a-2-")
