"""The manifest, which the installer reads, and the bindings, which run, say the same."""

from __future__ import annotations

from deepinfer_sm80 import bindings, gate

from deepinfer_cli.detect import gpu, target
from deepinfer_cli.overlay import manifest


def test_same_modules_symbols_and_ops():
    replaced = {
        (op.name, symbol.module.removesuffix(".py").replace("/", "."), symbol.name)
        for op in manifest.load().ops
        for symbol in op.replaces
    }
    bound = {(one.op, module, one.name) for module, group in bindings.ALL.items() for one in group}
    assert bound == replaced


def test_same_architectures():
    assert gate.ARCHS == gpu.SERVED


def test_same_layouts():
    assert bindings.LAYOUTS == target.LAYOUTS
