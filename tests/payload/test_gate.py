"""The gate: switches, and what a launch may know about the card."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from deepinfer_sm80 import gate


@pytest.fixture(autouse=True)
def fresh_sm_counts():
    gate._sm_count_of.cache_clear()
    yield
    gate._sm_count_of.cache_clear()


def cuda(monkeypatch, *cards, current=0, sm_count=132):
    """A torch whose CUDA has `cards`."""
    fake = SimpleNamespace(
        is_available=lambda: bool(cards),
        is_initialized=lambda: bool(cards),
        current_device=lambda: current,
        get_device_capability=lambda: cards[current],
        get_device_properties=lambda index: SimpleNamespace(multi_processor_count=sm_count + index),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))


@pytest.mark.parametrize("value", ["1", "true", "YES", " 1 "])
def test_on(monkeypatch, value):
    monkeypatch.setenv("DEEPINFER_DISABLE", value)
    assert gate.disabled()


@pytest.mark.parametrize("value", ["", "0", "false", "No"])
def test_off(monkeypatch, value):
    monkeypatch.setenv("DEEPINFER_DISABLE", value)
    assert not gate.disabled()


@pytest.mark.parametrize("value", ["2", "on", "gather"])
def test_neither_on_nor_off(monkeypatch, value):
    monkeypatch.setenv("DEEPINFER_DISABLE", value)
    with pytest.raises(gate.SwitchError, match=value):
        gate.disabled()


def test_ops(monkeypatch):
    assert gate.enabled_ops(("gather", "combine")) == ("combine", "gather")
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", "gather")
    assert gate.enabled_ops(("gather", "combine")) == ("combine",)
    assert gate.enabled_ops(("gather", "combine"), skip=("combine",)) == ()


@pytest.mark.parametrize(
    "arch, capability, smem",
    [("sm80", (8, 0), 166_912), ("sm86", (8, 6), 101_376), ("sm89", (8, 9), 101_376)],
)
def test_forced_arch_needs_no_card(monkeypatch, arch, capability, smem):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", arch)
    device = gate.device()
    assert (device.arch, device.capability, device.smem_limit, device.forced) == (
        arch,
        capability,
        smem,
        True,
    )
    assert device.sm_count == gate.SM_COUNTS[arch]


@pytest.mark.parametrize("value", ["sm90", "8.0", "ampere"])
def test_unknown_arch(monkeypatch, value):
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", value)
    with pytest.raises(gate.SwitchError, match=r"sm80, sm86, sm89"):
        gate.device()


def test_without_vllm_torch_is_asked(monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    cuda(monkeypatch, (9, 0), (8, 6), current=1)
    device = gate.device()
    assert (device.arch, device.forced, device.sm_count) == ("sm86", False, 133)


@pytest.mark.parametrize("cards", [(), ((9, 0),), ((8, 7),), ((7, 5),)])
def test_no_card_that_is_served(monkeypatch, cards):
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    cuda(monkeypatch, *cards)
    assert gate.device() is None


def test_no_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gate.capability() is None


def test_forced_arch_counts_the_sms_of_the_real_card(monkeypatch):
    cuda(monkeypatch, (9, 0))
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    assert gate.device().sm_count == 132


def test_assumed_sm_counts_nest_and_end(monkeypatch):
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    device = gate.device()
    before = device.sm_count
    with pytest.raises(ZeroDivisionError), gate.assume(sm_count=72):
        assert device.sm_count == 72
        with gate.assume(sm_count=84):
            assert device.sm_count == 84
        assert device.sm_count == 72
        _ = 1 / 0
    assert device.sm_count == before


def test_assumed_shared_memory_is_never_more_than_the_architecture_has(monkeypatch):
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm86")
    with gate.assume(smem_limit=49_152), gate.assume(sm_count=72):
        assert (gate.device().smem_limit, gate.device().sm_count) == (49_152, 72)
    with gate.assume(smem_limit=1 << 20):
        assert gate.device().smem_limit == 101_376
    assert gate.device().smem_limit == 101_376


def test_asking_without_vllm_does_not_import_it():
    code = "import sys, deepinfer_sm80.gate as gate; gate.device(); print('vllm' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
