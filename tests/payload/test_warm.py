"""Warming up: what is compiled before serving is what the launches ask for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deepinfer_cli.validate import numerics

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.kernels
OPS = (
    "gather", "combine", "ragged", "sparse_prefill", "sparse_decode", "kv_insert", "indexer_k", "indexer_q",
)  # fmt: skip


class Launched(Exception):
    """The compiled kernel would now be loaded onto a GPU, which is not there."""


class Driver:
    """What Triton asks of a GPU on the way to a launch."""

    def __init__(self) -> None:
        def load(*_args: Any) -> None:
            raise Launched

        self.utils = SimpleNamespace(
            load_binary=load, get_device_properties=lambda _: {"max_shared_mem": 1 << 20}
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: None


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    import triton

    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(Driver())
    yield
    driver._active = before


@pytest.mark.parametrize("op", OPS)
def test_after_warming_up_no_launch_compiles(no_gpu, monkeypatch, op):
    from deepinfer_sm80 import warm
    from triton.runtime.jit import JITFunction

    # the fixture's device must not see kernels of another test's
    module = importlib.import_module(f"deepinfer_sm80.ops.{op}.triton")
    workloads = importlib.import_module(f"deepinfer_sm80.ops.{op}.workloads")
    for variant in module.variants("sm80"):
        variant.kernel.device_caches.clear()
    for variant in module.variants("sm80"):
        assert warm.triton_up(variant) is not None

    def compiles(self: Any, *_args: Any, **_kwargs: Any) -> None:
        raise AssertionError(f"{self.__name__} was compiled again")

    monkeypatch.setattr(JITFunction, "_do_compile", compiles)
    launches = 0
    for case in workloads.cases("smoke"):
        try:
            workloads.run(workloads.make_inputs(case, "cpu"))
        except Launched:
            launches += 1
    assert launches > 3
    for variant in module.variants("sm80"):
        variant.kernel.device_caches.clear()


@pytest.fixture
def warm(payload, monkeypatch) -> SimpleNamespace:
    """The module, with recorders in the place of compilers."""
    module = importlib.import_module(f"{payload.__name__}.warm")
    made = SimpleNamespace(up=module.up, first_call=module.first_call, mhc=[], ops=[], bound=set())
    kernels = ModuleType(f"{payload.__name__}.ops.mhc.tilelang")
    vars(kernels)["warm_up"] = made.mhc.append
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(module, "op_up", made.ops.append)
    monkeypatch.setattr(payload, "bound_ops", lambda: made.bound)
    return made


def test_every_bound_op_is_warmed_up_once(warm):
    warm.bound |= {"gather", "sparse_decode", "mhc_post", "mhc_pre_delayed"}
    warm.up(5120)
    warm.up(5120)
    assert (warm.mhc, warm.ops) == ([5120], ["gather", "sparse_decode"])


@pytest.mark.parametrize("first", ["combine", "sparse_prefill"])
def test_the_first_call_of_any_op_warms_up_all(warm, first):
    warm.bound |= {"combine", "sparse_prefill", "mhc_post"}
    for op in (first, "combine", "sparse_prefill"):
        warm.first_call(op)
    assert (warm.mhc, warm.ops) == ([], ["combine", "sparse_prefill"])
    warm.first_call(5120)
    warm.up(5120)
    assert (warm.mhc, warm.ops) == ([5120], ["combine", "sparse_prefill"])


def test_an_op_that_is_bound_later_is_warmed_up_then(warm):
    warm.bound |= {"combine"}
    warm.up()
    warm.bound |= {"gather"}
    warm.first_call("combine")
    assert warm.ops == ["combine"]
    warm.first_call("gather")
    assert warm.ops == ["combine", "gather"]


@pytest.mark.parametrize("missing", ["tilelang", "nvcc", None])
def test_without_tilelang_or_its_nvcc_only_triton_kernels_are_warmed_up(payload, monkeypatch, missing):
    module = importlib.import_module(f"{payload.__name__}.warm")
    tile = importlib.import_module(f"{payload.__name__}.tile")
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: missing != "tilelang" or None if name == "tilelang" else find(name, *rest),
    )
    monkeypatch.setattr(tile, "find_nvcc", lambda: (missing != "nvcc", "/usr/bin/nvcc"))
    compiled: list[str] = []
    monkeypatch.setattr(module, "triton_up", lambda variant: compiled.append(variant.name))
    tiled: list[str] = []
    monkeypatch.setattr(tile, "warm_up", lambda variants: tiled.extend(one.name for one in variants))
    module.op_up("sparse_prefill")
    assert compiled == ["16x16", "16x16-narrow"]
    assert bool(tiled) == (missing is None)


def test_what_is_left_to_stock_is_not_warmed_up(warm):
    warm.bound |= {"combine"}
    warm.up(5120)
    assert (warm.mhc, warm.ops) == ([], ["combine"])


def test_a_failure_is_not_taken_for_done(warm, monkeypatch, payload):
    warm.bound |= {"combine"}
    module = sys.modules[f"{payload.__name__}.warm"]

    def fails(_op: str) -> None:
        raise RuntimeError("does not compile")

    with monkeypatch.context() as patch:
        patch.setattr(module, "op_up", fails)
        with pytest.raises(RuntimeError, match="does not compile"):
            warm.up(5120)
    warm.up(5120)
    assert warm.ops == ["combine"]


def test_an_ops_variants_are_found_by_its_files(payload, monkeypatch):
    module = importlib.import_module(f"{payload.__name__}.warm")
    assert {variant.name for variant in module._variants("gather", "triton", "sm80")} == {"wide", "narrow"}
    assert module._variants("gather", "tilelang", "sm80") == ()
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    compiled: list[str] = []
    monkeypatch.setattr(module, "triton_up", lambda variant: compiled.append(variant.name))
    module.op_up("gather")
    assert compiled == ["wide", "narrow"]


def test_a_kernel_that_does_not_compile_says_which_and_by_what(payload, monkeypatch):
    """In an engine's log it is the last line that is read."""
    tile = importlib.import_module(f"{payload.__name__}.tile")
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")

    def fails(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("Compilation error: no kernel image\n" + 9999 * "x")

    compiler = SimpleNamespace(get_nvcc_compiler=lambda: "/nowhere/bin/nvcc")
    modules = {"": SimpleNamespace(compile=fails), ".contrib": SimpleNamespace(nvcc=compiler)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"tilelang{name}", module)
    monkeypatch.setattr(tile, "shared_bytes", lambda function: 0)
    variant = SimpleNamespace(name="post-1", archs=("sm80",), build=lambda: None, pass_configs={})
    for call in (tile.kernel, lambda one: tile.warm_up([one])):
        with pytest.raises(tile.CompileError) as caught:
            call(variant)
        text = str(caught.value)
        assert "post-1 does not compile for sm_80" in text and "none found at /nowhere/bin/nvcc" in text
        assert "DEEPINFER_DISABLE_OPS" in text and "no kernel image" in text and len(text) < 900
        assert numerics.is_compile_error(caught.value)
    # the next call tries again
    monkeypatch.setattr(sys.modules["tilelang"], "compile", lambda *_args, **_kwargs: "kernel")
    assert tile.kernel(variant) == "kernel"


def test_threads_that_warm_up_at_once_compile_each_kernel_once(payload, monkeypatch):
    tile = importlib.import_module(f"{payload.__name__}.tile")
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    made: list[str] = []

    def slow(function: str, **_kwargs: Any) -> str:
        time.sleep(0.02)
        made.append(function)
        return function

    monkeypatch.setitem(sys.modules, "tilelang", SimpleNamespace(compile=slow))
    monkeypatch.setattr(tile, "shared_bytes", lambda function: 0)
    variants = [
        SimpleNamespace(name=f"k{n}", archs=("sm80",), build=lambda n=n: f"k{n}", pass_configs={})
        for n in range(5)
    ]
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(tile.warm_up, variants) for _ in range(6)]:
            done.result()
    assert sorted(made) == [one.name for one in variants]
