"""The live check, run by path against a small vLLM that has the real hook blocks and the real payload."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.overlay import hook
from tests.fakes import ACCELERATE

from .conftest import BUILD, CACHE_UTILS, COMBINE, GATHER, MHC, PAYLOAD, ROCM, SPARSE, WARMUP, stub
from .test_adapters import (
    DECODE,
    DECODE_030,
    DECODE_031,
    FUSED,
    FUSED_ARGS,
    POST,
    POST_ARGS,
    PRE,
    PRE_ARGS,
    PREFILL,
    WARMUP_SOURCE,
    sparse_source,
)

LIVE = Path(__file__).parents[2] / "deepinfer_cli" / "validate" / "live.py"
GATHER_033 = "out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, use_fnuz=False, max_gather_len=None"
ROCM_030 = "topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N"
PLATFORM = """
from types import SimpleNamespace
class Platform:
    def is_cuda(self): return True
    def get_device_capability(self, device_id=0): return SimpleNamespace(major=8, minor=0)
current_platform = Platform()
"""
INIT = """
import importlib.util
__version__ = "0.33.0"
print("noise on stdout")
assert importlib.util.find_spec("compare") is None, "the CLI's modules are in the way"
"""
FILES = {
    "__init__.py": INIT,
    "platforms/__init__.py": PLATFORM,
    "models/__init__.py": "",
    "models/deepseek_v41/__init__.py": "from .nvidia import flashmla\n",
    "models/deepseek_v41/common/__init__.py": "",
    "models/deepseek_v41/common/ops/__init__.py": f"from .cache_utils import {COMBINE}, {GATHER}\n",
    "models/deepseek_v41/common/ops/cache_utils.py": stub(GATHER, GATHER_033)
    + stub(COMBINE, f"{ROCM_030}, out=None"),
    "models/deepseek_v41/nvidia/__init__.py": "",
    "models/deepseek_v41/nvidia/model.py": f"from vllm.model_executor.kernels.mhc.tilelang import {POST}, {PRE}\n",
    "models/deepseek_v41/nvidia/ops/__init__.py": "",
    "models/deepseek_v41/nvidia/ops/mhc.py": f"from vllm.model_executor.kernels.mhc.tilelang import {FUSED}\n",
    "models/deepseek_v41/nvidia/flashmla.py": (
        f"from vllm.models.deepseek_v41.common.ops import {COMBINE}, {GATHER}\nimport vllm.v1.ops\n"
    ),
    "models/deepseek_v41/amd/__init__.py": "",
    "models/deepseek_v41/amd/rocm.py": (
        f"from vllm.models.deepseek_v41.common.ops import {GATHER}\n"
        f"from vllm.v1.attention.ops.rocm_aiter_mla_sparse import {BUILD}, {DECODE}, {PREFILL}\n"
        + stub(COMBINE, ROCM_030)
    ),
    "models/deepseek_v4/__init__.py": "",
    "models/deepseek_v4/cache_utils.py": stub(GATHER, GATHER_033),
    "model_executor/__init__.py": "",
    "model_executor/kernels/__init__.py": "",
    "model_executor/kernels/mhc/__init__.py": "from .tilelang import *\n",
    "model_executor/kernels/mhc/tilelang.py": stub(PRE, PRE_ARGS)
    + stub(FUSED, FUSED_ARGS)
    + stub(POST, POST_ARGS),
    # a kernel that has the name of the function that launches it
    "model_executor/kernels/mhc/tilelang_kernels.py": f"{POST} = object()\n",
    "model_executor/kernels/mhc/warmup.py": WARMUP_SOURCE,
    "v1/attention/__init__.py": "",
    "v1/attention/ops/__init__.py": "",
    "v1/attention/ops/rocm_aiter_mla_sparse.py": sparse_source(DECODE_031),
    "v1/__init__.py": "",
    "v1/ops.py": f"from vllm.models.deepseek_v41.common.ops import {COMBINE}\n",
}
HOOKED = {
    CACHE_UTILS: "models/deepseek_v41/common/ops/cache_utils.py",
    ROCM: "models/deepseek_v41/amd/rocm.py",
    SPARSE: "v1/attention/ops/rocm_aiter_mla_sparse.py",
    MHC: "model_executor/kernels/mhc/tilelang.py",
    WARMUP: "model_executor/kernels/mhc/warmup.py",
}
# the small vLLM has what the accelerate group replaces
OPS = [op for op in ACCELERATE if op != "yoco"]
EVERY_OP = [op for op in OPS if op != "mhc_post_with_sqrsum"]
HOLDERS = {
    (CACHE_UTILS, COMBINE),
    (CACHE_UTILS, GATHER),
    ("vllm.models.deepseek_v41.common.ops", COMBINE),
    ("vllm.models.deepseek_v41.common.ops", GATHER),
    ("vllm.models.deepseek_v41.nvidia.flashmla", COMBINE),
    ("vllm.models.deepseek_v41.nvidia.flashmla", GATHER),
    ("vllm.v1.ops", COMBINE),
}
ATTENTION = {(SPARSE, symbol) for symbol in (BUILD, PREFILL, DECODE)}
# with amd/rocm.py imported, which imports the sparse attention module
ROCM_HOLDERS = HOLDERS | ATTENTION | {(ROCM, symbol) for symbol in (COMBINE, GATHER, BUILD, PREFILL, DECODE)}

Write = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Write:
    """Writes a vLLM with the overlay in it; `changed` files take the place of the usual ones."""

    def write(
        *, skip: tuple[str, ...] = (), payload: bool = True, changed: dict[str, str] | None = None
    ) -> Path:
        parent = tmp_path / "site päckages"
        for name, text in {**FILES, **(changed or {})}.items():
            file = parent / "vllm" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        for name in HOOKED.values():
            file = parent / "vllm" / name
            file.write_bytes(hook.append(file.read_bytes(), skip))
        if payload:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PAYLOAD, parent / "vllm" / "deepinfer_sm80", ignore=ignore)
        return parent

    return write


def live(
    parent: Path | None,
    *,
    modules: tuple[str, ...] = (CACHE_UTILS,),
    env: dict[str, str] | None = None,
    site: bool = False,
    **request: Any,
):
    """The answer of a child that has the standard library alone, and what it put on stdout."""
    document = {
        "parent": str(parent) if parent else None,
        "layout": "deepseek_v41",
        "modules": modules,
        "expect": ["combine", "gather"],
        "skipped": [],
        "mode": "bound",
        **request,
    }
    run = subprocess.run(
        [sys.executable, *([] if site else ["-S"]), str(LIVE)],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    return json.loads(line)


def held(answer: dict[str, Any], same: bool) -> set[tuple[str, str]]:
    return {(one["module"], one["symbol"]) for one in answer["importers"] if one["same"] is same}


def test_bound_everywhere(tree):
    parent = tree()
    answer = live(parent)
    assert (answer["ok"], answer["problems"], answer["error"]) == (True, [], None)
    assert held(answer, True) == HOLDERS
    assert held(answer, False) == set()
    assert {(one["module"], one["symbol"]) for one in answer["report"]["bound"]} == {
        (CACHE_UTILS, COMBINE),
        (CACHE_UTILS, GATHER),
    }
    assert answer["vllm_file"] == str(parent / "vllm" / "__init__.py")
    assert answer["payload_file"] == str(parent / "vllm" / "deepinfer_sm80" / "__init__.py")
    assert answer["report"]["arch"] == "sm80"


def test_modules_outside_the_models_folder(tree):
    also = ["vllm.models.deepseek_v4.cache_utils", "vllm.model_executor.kernels.mhc.tilelang_kernels"]
    answer = live(tree(), modules=tuple(HOOKED), expect=list(OPS), also=also)
    assert answer["ok"], answer
    assert {one["op"] for one in answer["report"]["bound"]} == set(EVERY_OP)
    package = "vllm.model_executor.kernels.mhc"
    assert held(answer, True) == ROCM_HOLDERS | {
        (WARMUP, "MHCPreNormKernel.compile_many"),
        *((module, symbol) for module in (MHC, package) for symbol in (PRE, FUSED, POST)),
    }


def test_a_module_anywhere_that_still_holds_stocks_function_is_named(tree):
    source = f"from .tilelang import {POST} as ours\n{POST} = ours.__deepinfer__['stock']\n"
    files = {"model_executor/kernels/mhc/early.py": source}
    early = "vllm.model_executor.kernels.mhc.early"
    answer = live(tree(changed=files), modules=tuple(HOOKED), expect=list(OPS), also=[early])
    assert not answer["ok"]
    assert answer["problems"] == [f"{early} holds another {POST} than it must"]


def test_a_method_that_was_put_back_is_noticed(tree):
    source = (
        "from .warmup import MHCPreNormKernel as kernel\n"
        "kernel.compile_many = kernel.compile_many.__deepinfer__['stock']\n"
    )
    files = {"model_executor/kernels/mhc/early.py": source}
    early = "vllm.model_executor.kernels.mhc.early"
    answer = live(tree(changed=files), modules=tuple(HOOKED), expect=list(OPS), also=[early])
    assert answer["problems"] == [f"{WARMUP} holds another MHCPreNormKernel.compile_many than it must"]


def test_a_name_that_a_module_imports_is_replaced_there_alone(tree):
    """Other modules go on with the function itself, and whoever took it before the hook ran is no fault."""
    indexer = "v1/attention/backends/mla/indexer.py"
    took = "from vllm.utils.deep_gemm import has_deep_gemm\n"
    files = {
        "utils/__init__.py": "",
        "utils/deep_gemm.py": "def has_deep_gemm():\n    return True\n",
        "v1/attention/backends/__init__.py": "",
        "v1/attention/backends/mla/__init__.py": "",
        indexer: took + hook.block().decode(),
        "v1/worker.py": took,
    }
    name = "vllm.v1.attention.backends.mla.indexer"
    request = {"modules": (CACHE_UTILS, name), "expect": ["combine", "gather", "indexer_metadata"]}
    answer = live(tree(changed=files), **request, also=["vllm.v1.worker"])
    assert (answer["problems"], answer["error"]) == ([], None)
    assert held(answer, True) == HOLDERS | {(name, "has_deep_gemm")}
    put_back = files | {
        "v1/worker.py": f"import {name} as indexer\n{took}indexer.has_deep_gemm = has_deep_gemm\n"
    }
    answer = live(tree(changed=put_back, payload=False), **request, also=["vllm.v1.worker"])
    assert answer["problems"] == [f"{name} holds another has_deep_gemm than it must"]


def test_the_rocm_module_has_its_own(tree):
    answer = live(tree(), modules=(CACHE_UTILS, ROCM))
    assert answer["ok"], answer
    assert held(answer, True) == ROCM_HOLDERS
    assert (ROCM, COMBINE) in {(one["module"], one["symbol"]) for one in answer["report"]["bound"]}


def test_modules_that_have_no_hook_are_looked_at(tree):
    late = "vllm.models.deepseek_v41.amd.late"
    source = f"from vllm.models.deepseek_v41.common.ops import {COMBINE}\n"
    answer = live(tree(changed={"models/deepseek_v41/amd/late.py": source}), also=[late])
    assert answer["ok"], answer
    assert held(answer, True) == HOLDERS | {(late, COMBINE)}


def test_another_vllm_in_the_way_is_not_the_target(tree, tmp_path):
    other = tmp_path / "other" / "vllm"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    parent = tree()
    assert live(parent, env={"PYTHONPATH": str(other.parent)})["ok"]
    assert live(parent, env={"PYTHONPATH": str(parent)})["ok"]
    (tmp_path / "sitecustomize.py").write_text("import vllm\n")
    answer = live(parent, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{other.parent}"}, site=True)
    assert "another vLLM" in answer["error"]["message"]


def test_switched_off_all_is_stock(tree):
    parent = tree()
    answer = live(parent, modules=(CACHE_UTILS, ROCM), mode="stock", env={"DEEPINFER_DISABLE": "1"})
    assert answer["ok"], answer
    assert answer["report"]["bound"] == []
    assert held(answer, True) == ROCM_HOLDERS


def test_stock_was_asked_for_but_it_is_bound(tree):
    answer = live(tree(), mode="stock")
    assert not answer["ok"]
    assert f"{CACHE_UTILS}.{COMBINE} is bound" in answer["problems"]


def test_skipped_op_is_stock(tree):
    answer = live(tree(skip=("combine",)), expect=["gather"], skipped=["combine"])
    assert answer["ok"], answer
    assert answer["report"]["skipped"] == ["combine"]


def test_skipped_in_the_file_but_expected(tree):
    answer = live(tree(skip=("combine",)))
    assert not answer["ok"]
    assert "op combine is not bound" in answer["problems"]


def test_a_module_that_holds_another_object_is_named(tree):
    answer = live(tree(changed={"v1/ops.py": stub(COMBINE, ROCM_030)}))
    assert not answer["ok"]
    assert held(answer, False) == {("vllm.v1.ops", COMBINE)}
    assert any("vllm.v1.ops" in problem for problem in answer["problems"])


def test_stock_put_back_after_the_hook_is_noticed(tree):
    source = (
        FILES["models/deepseek_v41/nvidia/flashmla.py"]
        + "from vllm.models.deepseek_v41.common.ops import cache_utils\n"
        + f"cache_utils.{GATHER} = {GATHER}.__deepinfer__['stock']\n"
    )
    answer = live(tree(changed={"models/deepseek_v41/nvidia/flashmla.py": source}))
    assert not answer["ok"]
    assert f"{CACHE_UTILS} holds another {GATHER} than it must" in answer["problems"]
    assert (CACHE_UTILS, COMBINE) in held(answer, True)


def test_a_hook_that_is_gone_is_noticed(tree):
    parent = tree()
    file = parent / "vllm" / HOOKED[CACHE_UTILS]
    file.write_bytes(hook.strip(file.read_bytes()))
    answer = live(parent)
    assert not answer["ok"]
    assert "op gather is not bound" in answer["problems"]


def test_closed_gate_is_said(tree):
    answer = live(tree(changed={"platforms/__init__.py": PLATFORM.replace("major=8", "major=9")}))
    assert not answer["ok"]
    assert "the overlay is off here" in answer["problems"][0]


def test_forced_arch_opens_it(tree):
    parent = tree(changed={"platforms/__init__.py": PLATFORM.replace("major=8", "major=9")})
    answer = live(parent, env={"DEEPINFER_FORCE_ARCH": "sm89"})
    assert answer["ok"], answer
    assert (answer["report"]["arch"], answer["report"]["forced"]) == ("sm89", True)


def test_not_importable_is_not_bound_wrongly(tree):
    answer = live(tree(changed={"models/deepseek_v41/nvidia/flashmla.py": "import not_installed_here\n"}))
    assert not answer["ok"]
    assert answer["problems"] == []
    assert (answer["error"]["kind"], answer["error"]["stage"]) == ("ModuleNotFoundError", "import")
    assert "not_installed_here" in answer["error"]["message"]


def test_exit_during_import_is_reported(tree):
    answer = live(tree(changed={"models/deepseek_v41/nvidia/flashmla.py": "raise SystemExit('no GPU')\n"}))
    assert (answer["error"]["kind"], answer["error"]["message"]) == ("SystemExit", "no GPU")


def test_no_vllm_at_all(tmp_path):
    answer = live(tmp_path)
    assert (answer["error"]["kind"], answer["error"]["stage"]) == ("ModuleNotFoundError", "import")


def test_refusal_of_the_overlay(tree):
    source = stub(GATHER, "out") + stub(COMBINE, f"{ROCM_030}, out=None")
    answer = live(tree(changed={"models/deepseek_v41/common/ops/cache_utils.py": source}))
    assert (answer["error"]["kind"], answer["error"]["stage"]) == ("BindError", "bind")
    assert "deepinfer status" in answer["error"]["message"]


def test_bad_switch(tree):
    answer = live(tree(), env={"DEEPINFER_FORCE_ARCH": "sm90"})
    assert (answer["error"]["kind"], answer["error"]["stage"]) == ("SwitchError", "bind")


def test_hook_without_payload(tree):
    answer = live(tree(payload=False))
    assert (answer["error"]["kind"], answer["error"]["stage"]) == ("ModuleNotFoundError", "bind")


def test_unfinished_install(tree):
    parent = tree()
    (parent / ".deepinfer").mkdir()
    (parent / ".deepinfer" / "journal.json").write_text("{}")
    answer = live(parent)
    assert answer["error"]["stage"] == "bind"
    assert "interrupted" in answer["error"]["message"]


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.33.0"])
def test_a_real_release_without_torch_is_not_importable(release_tree, version):
    root = release_tree(version)
    answer = live(root.parent)
    assert not answer["ok"]
    assert (answer["problems"], answer["error"]["stage"]) == ([], "import")


FEW_CALLS = """
import sys
sys.path[:0] = [{root!r}, {site!r}]
from scripts import gpu_live_calls, gpu_live_cases
every = gpu_live_cases.cases
few = ("one-row", "ratio-2", "usual", "rotated", "dense-holes")
gpu_live_cases.cases = lambda op, caller: (one for one in every(op, caller) if one[0] in few)
gpu_live_calls.main([{answer!r}, "deepseek_v41", {stock!r}, "cold", "amd.rocm", "nvidia.flashmla", "nvidia.model"])
"""


def gpu_calls(site: Path, tmp_path: Path, stock: str = "ignore-stock") -> list[dict[str, Any]]:
    """What the child of `scripts/gpu_live_check.py` answers here, in Triton's interpreter, with a few cases."""
    answer = tmp_path / "answer.json"
    code = FEW_CALLS.format(root=str(LIVE.parents[2]), site=str(site), answer=str(answer), stock=stock)
    env = {**os.environ, "TRITON_INTERPRET": "1", "DEEPINFER_FORCE_ARCH": "sm80", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(answer.read_text())


def of(calls: list[dict[str, Any]], symbol: str) -> list[dict[str, Any]]:
    return [call for call in calls if call.get("symbol") == symbol and "holder" in call]


@pytest.mark.kernels
def test_gpu_script_sees_calls_reach_the_kernels(tree, tmp_path):
    pytest.importorskip("triton")
    calls = gpu_calls(tree(), tmp_path)
    for symbol, count in ((GATHER, 2), (COMBINE, 2), (BUILD, 1), (PREFILL, 2), (DECODE, 3)):
        found = of(calls, symbol)
        assert [(call["calls"], call["as_oracle"], call["ok"]) for call in found] == [
            (1, True, True)
        ] * count, found
    assert [call["contract"] for call in of(calls, COMBINE)] == [
        {"replay_clamp": False, "width_cap": True},
        {"replay_clamp": True, "width_cap": False},
    ]
    assert [call["contract"] for call in of(calls, BUILD)] == [{"compact": True}]
    # 0.31 and later: rows that were rotated here are counted, and rotated once
    decodes = {call["case"]: (call["returned"], call["rotated"]) for call in of(calls, DECODE)}
    assert decodes == {"usual": (0, False), "rotated": (2, True), "one-row": (0, False)}
    # the mHC kernels need a GPU, and nobody imports the fused step here
    assert of(calls, PRE) == of(calls, POST) == []
    assert [call for call in calls if call.get("error")] == [
        {"symbol": FUSED, "ok": False, "error": "no caller holds it"}
    ]


@pytest.mark.kernels
def test_gpu_script_sees_that_0_30_rotates_nothing(tree, tmp_path):
    pytest.importorskip("triton")
    source = sparse_source(DECODE_030).replace(
        "_count_valid_row_entries_kernel", "_pack_dense_prefix_to_ragged_kernel"
    )
    calls = gpu_calls(tree(changed={"v1/attention/ops/rocm_aiter_mla_sparse.py": source}), tmp_path)
    decodes = of(calls, DECODE)
    assert [(call["returned"], call["rotated"], call["ok"]) for call in decodes] == [(None, False, True)] * 3
    assert [call["contract"] for call in of(calls, BUILD)] == [{"compact": False}]


@pytest.mark.kernels
def test_gpu_script_notices_other_results_and_missing_hooks(tree, tmp_path):
    pytest.importorskip("triton")
    site = tree()
    # the small vLLM's functions compute nothing, so none may pass for equal
    calls = gpu_calls(site, tmp_path, "compare-stock")
    compared = [
        call for call in calls if "as_stock" in call and call["case"] not in ("rotated", "dense-holes")
    ]
    assert [call["ok"] for call in compared] == [False] * len(compared)
    assert {call["symbol"] for call in compared} == {GATHER, COMBINE, BUILD, PREFILL, DECODE}
    for name in HOOKED.values():
        file = site / "vllm" / name
        file.write_bytes(hook.strip(file.read_bytes()))
    calls = [call for call in gpu_calls(site, tmp_path) if "holder" in call]
    assert {call.get("ours", False) for call in calls} == {False}
    assert not any(call["ok"] for call in calls)


@pytest.mark.kernels
def test_gpu_script_sees_a_decode_that_counts_rows_it_did_not_rotate(tree, tmp_path, monkeypatch):
    """The trap in stock: it returns their number and rotates none."""
    pytest.importorskip("triton")
    site = tree()
    adapter = site / "vllm" / "deepinfer_sm80" / "bindings" / "rocm_aiter_mla_sparse.py"
    text = adapter.read_text()
    assert ", **_lists(stock, swa, extra), **rotation)" in text
    adapter.write_text(
        text.replace(", **_lists(stock, swa, extra), **rotation)", ", **_lists(stock, swa, extra))")
    )
    decodes = {
        call["case"]: (call["returned_right"], call["ok"]) for call in of(gpu_calls(site, tmp_path), DECODE)
    }
    assert decodes == {"usual": (True, True), "rotated": (True, False), "one-row": (True, True)}
