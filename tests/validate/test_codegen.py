"""Rows are labelled by the code that was compiled, for Triton and for TileLang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from deepinfer_cli.validate.codegen import Codegen, nvcc_code, triton_code
from tests.validate.conftest import toolkit_missing

NO_TILELANG = toolkit_missing()
_COMPILE = """
import os, sys
from pathlib import Path
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deepinfer_cli.validate.codegen import Codegen

@triton.jit
def _copy(x_ptr, y_ptr, N: tl.constexpr):
    offset = tl.arange(0, N)
    tl.store(y_ptr + offset, tl.load(x_ptr + offset))

codegen = Codegen("sm80")
codegen.watch()
# the target is the card, as on a machine with one; the variable that `of` sets decides what code is made
for name in ("stock", "overlay", "overlay", "stock-sm80"):
    with codegen.of(name):
        signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "N": "constexpr"}
        triton.compile(ASTSource(_copy, signature, {"N": 128}), target=GPUTarget("cuda", 90, 32))
assert "TRITON_OVERRIDE_ARCH" not in os.environ
with codegen.forced():
    triton.compile(ASTSource(_copy, signature, {"N": 256}), target=GPUTarget("cuda", 90, 32))
assert codegen.seen.pop("") == {"sm80"}
print(*map(codegen.name, ("overlay", "stock", "torch", "stock-sm80")))
"""


@pytest.mark.kernels
def test_codegen_is_read_from_the_compiled_kernels(tmp_path: Path):
    script = tmp_path / "compile_both.py"
    script.write_text(_COMPILE)
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["sm80", "native", "native", "sm80"], done.stderr[-2000:]


_COMPILE_TILES = """
import tilelang, tilelang.language as T
from tilelang import tvm
from deepinfer_cli.validate.codegen import Codegen

@T.prim_func
def add(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            B[i] = A[i] + 1

codegen = Codegen("sm80")
codegen.watch_tilelang()
targets = {"overlay": {"arch": "sm_80", "code": ["sm_90"]}, "stock": {"arch": "sm_90a"}}
for name, target in targets.items():
    target = tvm.target.Target({"kind": "cuda", **target})
    with codegen.of(name), target, tvm.transform.PassContext(opt_level=3):
        tilelang.lower(add, target=target, target_host="c", enable_device_compile=True)
print(codegen.name("overlay"), codegen.name("stock"))
"""


@pytest.mark.kernels
@pytest.mark.skipif(NO_TILELANG != "", reason=NO_TILELANG)
def test_codegen_is_read_from_the_compiler_commands_of_tilelang(tmp_path: Path):
    script = tmp_path / "compile_tiles.py"
    script.write_text(_COMPILE_TILES)
    env = os.environ | {"TILELANG_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-2:] == ["sm80", "native"], done.stderr[-2000:]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        (["-arch=sm_80"], "sm80"),
        (["-gencode", "arch=compute_86,code=sm_90"], "sm86"),
        (["-gencode", "arch=compute_80,code=[sm_80,sm_90]"], "sm80"),
        (["-gencode", "arch=compute_90a,code=sm_90a"], "native"),
        ("-arch=sm_75", "native"),
        (None, "unknown"),
        (["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=sm_90"], "unknown"),
    ],
)
def test_an_nvcc_command_names_the_code_that_it_starts_from(options, want):
    assert nvcc_code(options) == want


@pytest.mark.parametrize("seen", [set(), {"native"}, {"sm80", "native"}, {"sm86"}])
def test_overlay_code_that_is_not_what_was_asked_for_is_never_labelled(seen):
    codegen = Codegen("sm80", {"overlay": seen})
    with pytest.raises(RuntimeError, match="not for sm80"):
        codegen.name("overlay")


def test_code_that_cannot_be_read_is_not_named_by_what_was_asked_for(tmp_path: Path):
    assert triton_code({"metadata": {"arch": "sm80"}, "metadata_group": {}}) == "unknown"
    ir = tmp_path / "kernel.ttgir"
    for text, want in (("hip:gfx942", "unknown"), ('"cuda:90"', "native"), ('"cuda:86"', "sm86")):
        ir.write_text(text)
        assert triton_code({"metadata": {}, "metadata_group": {"kernel.ttgir": str(ir)}}) == want


def test_on_an_ampere_card_the_code_is_named_by_the_card():
    codegen = Codegen(None, {"overlay": {"sm86"}, "baseline": {"sm86"}})
    assert (codegen.name("overlay"), codegen.name("stock")) == ("sm86", "sm86")
