"""What was recorded can be compiled again, for an architecture that is not here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[3] / "scripts" / "compile_recorded.py"

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def twice(x):
    return x + x


@triton.jit
def good(x, out, n, BLOCK: tl.constexpr, TYPE: tl.constexpr, F: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, F(tl.load(x + at, at < n, other=0.0)).to(TYPE), at < n)


class Holder:
    kernel = good


@triton.jit
def fp8(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(tl.float8e4nv, bitcast=True).to(tl.float32))
"""
OPTIONS = {"num_warps": 4, "num_stages": 2, "num_ctas": 1, "maxnreg": None}
GOOD = {
    "module": "kernels_here", "name": "Holder.kernel",
    "signature": {
        "x": "*fp32", "out": "*bf16", "n": "i32", "BLOCK": "constexpr", "TYPE": "constexpr", "F": "constexpr",
    },
    "constexprs": [[[3], 64], [[4], {"dtype": "bf16"}], [[5], {"function": ["kernels_here", "twice"]}]],
    "attrs": [[[0], [["tt.divisibility", 16]]]], "options": OPTIONS, "warmup": False,
}  # fmt: skip
FP8 = {
    "module": "kernels_here", "name": "fp8", "signature": {"x": "*u8", "out": "*fp32", "BLOCK": "constexpr"},
    "constexprs": [[[2], 64]], "attrs": [], "options": OPTIONS, "warmup": True,
}  # fmt: skip


def run(tmp_path, *kernels, archs=("sm80", "sm86")):
    (tmp_path / "kernels_here.py").write_text(KERNELS)
    record = tmp_path / "kernels.jsonl"
    record.write_text("".join(json.dumps(kernel) + "\n" for kernel in kernels))
    command = [sys.executable, str(SCRIPT), str(record), "--path", str(tmp_path), "--arch", *archs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_good_kernel_compiles_and_counts_once(tmp_path):
    code, result = run(tmp_path, GOOD, {**GOOD, "warmup": True})
    assert (code, result["failed"], result["specializations"]) == (0, [], 1)
    assert result["kernels"] == ["kernels_here.Holder.kernel"]


def test_fp8_fails_on_ampere_alone(tmp_path):
    code, result = run(tmp_path, GOOD, FP8, archs=("sm80", "sm89"))
    assert code == 1
    (failed,) = result["failed"]
    assert (failed["kernel"], failed["arch"]) == ("kernels_here.fp8", "sm80")
    assert "fp8e4nv" in failed["problem"]


@pytest.mark.parametrize(
    "broken",
    [
        {"problem": "TypeError: x"},
        {**GOOD, "module": "gone"},
        {**GOOD, "constexprs": [[[3], 64], [[4], {"other": "?"}], [[5], 1]]},
    ],
)
def test_what_cannot_be_built_again_fails(tmp_path, broken):
    code, result = run(tmp_path, broken, archs=("sm80",))
    assert code == 1
    assert len(result["failed"]) == 1


def test_of_an_archive_only_generated_code_counts(tmp_path):
    spec = importlib.util.spec_from_file_location("compile_recorded", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, generated in (("stock", False), ("sm80", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "document.json").write_text(
            json.dumps({"generated": generated, "kernels": [{"name": name}]})
        )
    with tarfile.open(tmp_path / "runs.tar.gz", "w:gz") as archive:
        for name in ("stock", "sm80"):
            archive.add(tmp_path / name / "document.json", f"{name}/document.json")
    assert module.read(tmp_path / "runs.tar.gz") == [{"name": "sm80"}]


def test_the_document_of_verify_is_a_record(tmp_path):
    runs = [{"arch": "sm80", "kernels": [GOOD]}, {"arch": None, "kernels": [FP8]}]
    (tmp_path / "verify.json").write_text(json.dumps({"data": {"runs": runs}}))
    (tmp_path / "kernels_here.py").write_text(KERNELS)
    command = [
        sys.executable,
        str(SCRIPT),
        str(tmp_path / "verify.json"),
        "--path",
        str(tmp_path),
        "--arch",
        "sm80",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
