"""Environment variables of a server that go wrong with DeepSeek-V4.1 on SM8x, each with its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

Severity = Literal["note", "problem"]
_OFF = frozenset({"0", "false", "no", "off"})
_ON = frozenset({"1", "true", "yes", "on"})


def on(value: Any) -> bool:
    """Whether a value turns a switch on."""
    return str(value).strip().lower() in _ON


def off(value: Any) -> bool:
    """Whether a value turns a switch off."""
    return str(value).strip().lower() in _OFF


# name, whether a value goes wrong, severity, what happens, what to do, source
_Variable = tuple[str, Callable[[str], bool], Severity, str, str, str]
VARIABLES: tuple[_Variable, ...] = (
    ("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", lambda value: value.lower() not in ("true", "1"), "problem",
     "wo_a stays packed, and the output projection needs it as bfloat16 rows", "unset it",
     "vllm/envs.py; rocm_aiter_mla_sparse.py, _get_cached_wo_a_bf16"),
    ("VLLM_USE_BREAKABLE_CUDAGRAPH", lambda value: value != "1", "problem",
     "this model cannot be torch.compiled: without breakable CUDA graphs vLLM stops when it captures, or runs without graphs",
     "unset it: vLLM turns it on for this model", "vllm/config/vllm.py; vLLM issue 52339"),
    ("VLLM_USE_V2_MODEL_RUNNER", off, "problem",
     "DSpark and the replay of sliding windows are in the V2 model runner only", "unset it",
     "vllm/config/vllm.py; models/deepseek_v41/attention.py"),
    ("VLLM_MARLIN_INPUT_DTYPE", lambda value: value.strip() != "", "problem",
     "Marlin's MXFP4 experts take bfloat16 activations here: int8 is refused, fp8 needs compute capability 8.9", "unset it",
     "quantization/utils/marlin_utils_fp4.py"),
    ("VLLM_PLE_CPU_OFFLOAD", off, "note",
     "vLLM 0.30 puts Engram's tables (188.8 GiB) on the GPUs; later releases do not read it", "unset it",
     "vllm/config/engram.py of 0.30.0"),
    ("TRITON_INTERPRET", on, "problem", "every Triton kernel runs in Triton's interpreter on the CPU", "unset it",
     "Triton"),
    ("TRITON_OVERRIDE_ARCH", lambda value: value.strip() != "", "note",
     "Triton makes code for that architecture, whatever card this is", "unset it outside of tests", "Triton"),
)  # fmt: skip
