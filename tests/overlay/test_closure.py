"""What an op's kernels are made of: another file, or another part of a shared file, is not."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.overlay import payload as payloads
from deepinfer_cli.overlay.closure import op_code, op_digest
from deepinfer_cli.overlay.payload import Payload
from deepinfer_cli.validate.ops import languages_of, ops_of
from tests.overlay.test_fingerprint import pythons

FILES = {
    "__init__.py": "from . import bindings\n\ndef bound_ops():\n    return bindings.OPS\n",
    "bindings/__init__.py": "OPS = ('a', 'b')\n",
    "gate.py": "LIMIT = 1\n",
    "numerics/__init__.py": "",
    "numerics/fp8.py": '"""Numbers."""\n\nBIAS = 7\n\n\ndef decode(x):\n    return x + BIAS\n\n\ndef encode(x):\n    return x\n',
    "ops/__init__.py": "",
    "ops/spec.py": "class Base:\n    warps = 4\n\n\n@staticmethod\nclass Variant(Base):\n    pass\n\n\nclass Tolerance:\n    pass\n",
    "ops/a/__init__.py": "def a(x):\n    from .triton import launch\n    return launch(x)\n",
    "ops/a/triton.py": "import triton\nfrom ... import gate\nfrom ..spec import Variant\nfrom ..shared.tiles import build\n\ndef launch(x):\n    return build(gate.LIMIT)\n",
    "ops/a/workloads.py": "from ..spec import Tolerance\n",
    "ops/a/reference.py": "TRUTH = 1\n",
    "ops/shared/__init__.py": "",
    "ops/shared/tiles.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from ...numerics.fp8 import decode\n\nWIDE = 8\n\ndef build(x):\n    return WIDE\n\ndef other(x):\n    from ..b import b\n    return b(x)\n",
    "ops/b/__init__.py": "def b(x):\n    return x\n",
}  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Payload]:
    """A payload of `FILES`, with some of them changed: `made(path, old, new)`."""

    def make(*change: str) -> Payload:
        files = dict(FILES)
        if change:
            path, old, new = change
            assert old in files[path]
            files[path] = files[path].replace(old, new)
        root = tmp_path / "deepinfer_sm80"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return payloads.load(root)

    return make


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("ops/a/triton.py", "LIMIT)", "LIMIT + 1)"), id="kernel"),
        pytest.param(("ops/a/__init__.py", "launch(x)", "launch(x + 1)"), id="contract"),
        pytest.param(("gate.py", "1", "2"), id="whole-module"),
        pytest.param(("ops/spec.py", "warps = 4", "warps = 8"), id="base-of-an-imported-class"),
        pytest.param(("ops/spec.py", "@staticmethod", "@classmethod"), id="decorator"),
        pytest.param(("ops/shared/tiles.py", "WIDE = 8", "WIDE = 16"), id="what-an-imported-function-uses"),
        pytest.param(("ops/shared/__init__.py", "", "print()\n"), id="package-on-the-way"),
        pytest.param(("numerics/fp8.py", "BIAS = 7", "BIAS = 8"), id="import-within-an-if"),
    ],
)
def test_what_can_alter_a_kernel_changes_its_digest(
    made: Callable[..., Payload], change: tuple[str, ...]
) -> None:
    before = op_digest(made(), "a")
    assert op_digest(made(*change), "a") != before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("ops/spec.py", "class Tolerance:\n    pass", "class Other:\n    pass"), id="rest-of-a-file"),
        pytest.param(("numerics/fp8.py", "def encode(x):", "def encode(x, y):"), id="another-function"),
        pytest.param(("numerics/fp8.py", "Numbers", "Words"), id="docstring"),
        pytest.param(("ops/b/__init__.py", "return x", "return x + 1"), id="another-op"),
        pytest.param(("ops/a/workloads.py", "Tolerance", "Base"), id="workloads"),
        pytest.param(("ops/a/reference.py", "1", "2"), id="oracle"),
        pytest.param(("bindings/__init__.py", "'b'", "'c'"), id="bindings"),
        pytest.param(("__init__.py", "return", "return not"), id="the-payload-itself"),
    ],
)  # fmt: skip
def test_what_cannot_does_not(made: Callable[..., Payload], change: tuple[str, ...]) -> None:
    before = op_digest(made(), "a")
    changed = made(*change)
    assert op_digest(changed, "a") == before and changed.digest != made().digest


def test_a_name_of_the_payload_itself_counts(made: Callable[..., Payload]) -> None:
    code = op_code(made("ops/a/triton.py", "from ... import gate", "from ... import bound_ops, gate"), "a")
    assert "bound_ops" in code["__init__.py"] and "OPS" in code["bindings/__init__.py"]


def test_two_ops_differ_and_one_without_files_has_no_code(made: Callable[..., Payload]) -> None:
    found = made()
    assert op_digest(found, "a") != op_digest(found, "b")
    assert op_code(found, "none") == {}


# the real payload

OPS = ops_of(payloads.bundled().root)


@pytest.mark.parametrize("op", OPS)
def test_no_import_of_a_real_op_escapes(op: str) -> None:
    code = op_code(payloads.bundled(), op)
    assert f"ops/{op}/__init__.py" in code and any(
        path.endswith(("triton.py", "tilelang.py")) for path in code
    )
    assert "bindings/__init__.py" not in code and f"ops/{op}/workloads.py" not in code
    for path, text in code.items():
        called = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
        assert not called & {
            "__import__",
            "importlib.import_module",
            "import_module",
        }, path


def test_every_python_here_computes_the_same_digests() -> None:
    """A summary is measured under one Python and checked under others."""
    root = payloads.bundled().root
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from deepinfer_cli.overlay import closure, payload\n"
        "print(*(closure.op_digest(payload.load(payload.Path(sys.argv[2])), op) for op in sys.argv[3:]))"
    )
    digests = set()
    for python in pythons():
        command = [
            python,
            "-S",
            "-E",
            "-c",
            program,
            str(Path(payloads.__file__).parents[2]),
            str(root),
            *OPS,
        ]
        digests.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert digests == {" ".join(op_digest(payloads.bundled(), op) for op in OPS) + "\n"}


@pytest.mark.kernels
def test_what_a_real_op_loads_belongs_to_its_code() -> None:
    """Imports each op's modules without the payload's `__init__`, and asks which files that loaded."""
    pytest.importorskip("torch")
    root = payloads.bundled().root
    modules = {op: [op, *(f"{op}.{language}" for language in languages_of(root, op))] for op in OPS}
    command = [sys.executable, "-c", LOAD, str(root), json.dumps(modules)]
    loaded = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert loaded.keys() == set(OPS)
    for op, paths in loaded.items():
        found = {Path(path).relative_to(root).as_posix() for path in paths}
        assert len(found) > 2 and found <= op_code(payloads.bundled(), op).keys(), op


LOAD = """
import importlib, json, sys, types
name, loaded = "deepinfer_sm80", {}
for op, modules in json.loads(sys.argv[2]).items():
    for old in [old for old in sys.modules if old.startswith(name)]:
        del sys.modules[old]
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[1]]
    for module in modules:
        importlib.import_module(f"{name}.ops.{module}")
    loaded[op] = [module.__file__ for key, module in sys.modules.items() if key.startswith(name + ".")]
print(json.dumps(loaded))
"""
