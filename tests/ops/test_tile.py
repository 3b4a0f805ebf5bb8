"""What an op does where TileLang cannot compile."""

from __future__ import annotations

from types import SimpleNamespace

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
