"""What an op does where TileLang cannot compile, and what is refused for want of shared memory."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.kernels


def test_without_nvcc_triton_serves_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepinfer_sm80.ops.sparse_prefill import tilelang as kernel

    gpu = [SimpleNamespace(is_cuda=True, stride=lambda axis: 512, data_ptr=lambda: 0)] * 3
    monkeypatch.setattr(kernel.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kernel.tile, "find_nvcc", lambda: (False, "none found at /usr/local/cuda/bin/nvcc"))
    kernel._installed.cache_clear()
    try:
        assert [kernel.serves(*gpu) for _ in range(3)] == [False] * 3
        (line,) = caplog.messages
        assert "Triton" in line and "/usr/local/cuda/bin/nvcc" in line
        monkeypatch.setattr(kernel.tile, "find_nvcc", lambda: (True, "/usr/bin/nvcc"))
        kernel._installed.cache_clear()
        assert kernel.serves(*gpu)
    finally:
        kernel._installed.cache_clear()


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`tile` with an empty registry, in front of a TileLang that traces and does not compile."""
    tilelang = pytest.importorskip("tilelang")
    from deepinfer_sm80 import tile

    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm86")
    monkeypatch.setattr(tile, "_kernels", {})
    monkeypatch.setattr(tilelang, "compile", lambda function, **options: function.attrs["global_symbol"])
    return tile


def test_a_kernel_with_more_shared_memory_than_a_cta_may_have_is_refused(tiles: Any) -> None:
    from deepinfer_sm80 import gate
    from deepinfer_sm80.ops.sparse_prefill.tilelang import HEADS_32

    refusal = r"sparse_prefill-32-heads .* 48,128 bytes .* sm86 may have 48,127"
    with gate.assume(smem_limit=48_127), pytest.raises(ValueError, match=refusal):
        tiles.kernel(HEADS_32)
    with gate.assume(smem_limit=48_128):
        assert tiles.kernel(HEADS_32) == "sparse_prefill"
    # compiled already
    with gate.assume(smem_limit=48_127), pytest.raises(ValueError, match=refusal):
        tiles.kernel(HEADS_32)


def test_every_architectures_own_limit_holds(tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tilelang.language as T
    from deepinfer_sm80.ops.sparse_prefill.tilelang import HEADS_16

    def build() -> Any:
        @T.prim_func
        def large(out: T.Tensor((32,), "float32")):  # type: ignore[valid-type]
            with T.Kernel(1, threads=32):
                words = T.alloc_shared((40_000,), "float32")
                words[0] = 1.0
                out[0] = words[0]

        return large

    variant = dataclasses.replace(HEADS_16, name="large", build=build)
    with pytest.raises(ValueError, match=r"large .* 160,000 bytes .* sm86 may have 101,376"):
        tiles.kernel(variant)
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    assert tiles.kernel(variant) == "large"
