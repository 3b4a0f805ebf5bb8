"""The record of built kernels: enough to build them again, and one line for each specialization."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_cli.validate.e2e import record

pytest.importorskip("torch")
pytest.importorskip("triton")

# without a GPU nothing is launched: `_do_compile` is called as a launch calls it, and its compiler is a stand-in
SCRIPT = """
import sys, types
from pathlib import Path
import triton, triton.language as tl
from triton.runtime.jit import JITFunction

seen = []
JITFunction_stock = JITFunction._do_compile
def do_compile(self, key, signature, device, constexprs, options, attrs, warmup):
    seen.append(key)
    return "kernel"
JITFunction._do_compile = do_compile

sys.path.insert(0, sys.argv[2])
from deepinfer_cli.validate.e2e import record

assert record.start(Path(sys.argv[1])) is None

@triton.jit
def helper(x):
    return x

@triton.jit
def kernel(x, n, BLOCK: tl.constexpr, TYPE: tl.constexpr, F: tl.constexpr, NONE: tl.constexpr):
    pass

options = types.SimpleNamespace(num_warps=4, num_stages=2, num_ctas=1)
constexprs = {(2,): 64, (3,): tl.bfloat16, (4,): helper, (5,): None}
out = kernel._do_compile(
    "k", {"x": "*bf16", "n": "i32", "BLOCK": "constexpr"}, 0, constexprs, options,
    {(0,): [["tt.divisibility", 16]]}, False,
)
assert out == "kernel" and seen == ["k"]
kernel._do_compile(key="k2", signature={"x": "*u8"}, device=0, constexprs={}, options=options, attrs={}, warmup=True)
"""


def test_a_record_says_what_was_built(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "kernels.jsonl"
    script.write_text(SCRIPT)
    root = Path(record.__file__).parents[3]
    subprocess.run([sys.executable, str(script), str(out), str(root)], check=True)
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["module"], first["name"]) == ("__main__", "kernel")
    assert first["signature"] == {"x": "*bf16", "n": "i32", "BLOCK": "constexpr"}
    assert first["constexprs"] == [
        [[2], 64], [[3], {"dtype": "bf16"}], [[4], {"function": ["__main__", "helper"]}], [[5], None],
    ]  # fmt: skip
    assert first["attrs"] == [[[0], [["tt.divisibility", 16]]]]
    assert first["options"]["num_warps"] == 4
    assert (first["warmup"], second["warmup"]) == (False, True)


def test_what_cannot_be_recorded_is_said(tmp_path, monkeypatch):
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, other: None)
    assert "other parameters" in (record.start(tmp_path / "kernels") or "")
