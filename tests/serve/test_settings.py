"""Settings that go wrong: each is found, and its neighbour that is right is not."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from deepinfer_cli.serve import ranges, settings
from deepinfer_cli.serve.line import parse_options
from deepinfer_cli.serve.settings import Settings
from deepinfer_cli.serve.variables import VARIABLES

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"


def names(line: str = "", release: str = "0.33.0", **environ: str) -> list[tuple[str, str]]:
    found = settings.check(Settings(environ, parse_options(shlex.split(line)), release))
    return [(one.name, one.severity) for one in found]


@pytest.mark.parametrize(
    ("line", "name", "severity"),
    [
        ("--kv-cache-dtype nvfp4_ds_mla", "--kv-cache-dtype nvfp4_ds_mla", "problem"),
        ("--kv-cache-dtype=bfloat16", "--kv-cache-dtype bfloat16", "problem"),
        ("--block-size 64", "--block-size 64", "problem"),
        ("--cpu-offload-gb 10", "--cpu-offload-gb", "note"),
        ("--gpu-memory-utilization 0.97", "--gpu-memory-utilization 0.97", "note"),
        ("--attention-backend FLASHMLA", "--attention-backend FLASHMLA", "problem"),
        ("--attention-config.backend FLASHMLA", "--attention-backend FLASHMLA", "problem"),
        ("--prefill-context-parallel-size 2", "--prefill-context-parallel-size", "problem"),
        ("--moe-backend deep_gemm", "--moe-backend deep_gemm", "problem"),
        ("--moe-backend flashinfer-trtllm", "--moe-backend flashinfer_trtllm", "problem"),
        ("--moe-backend emulation", "--moe-backend emulation", "note"),
        ("--enable-expert-parallel -dp 2", "--enable-expert-parallel with --data-parallel-size", "note"),
        ("--enable-dbo", "--enable-dbo", "problem"),
        ("""--engram-config '{"cpu_offload": false}'""", "--engram-config cpu_offload false", "note"),
        ("--engram-config.cpu-offload False", "--engram-config cpu_offload false", "note"),
        ("--enforce-eager", "--enforce-eager", "note"),
        ("--kernel-config.enable_jit_warmup=False", "enable_jit_warmup off", "note"),
        ("""--kernel_config '{"enable_jit_warmup": false}'""", "enable_jit_warmup off", "note"),
        ("-tp 6", "--tensor-parallel-size 6", "problem"),
        ("-tp=16", "--tensor-parallel-size 16", "problem"),
        ("-pp 3", "3 equal stages", "problem"),
        ("--pipeline-parallel-size 9", "9 equal stages", "problem"),
        ("""-sc '{"method": "mtp"}'""", "--speculative-config method mtp", "problem"),
        ("-sc {method: dspark}", "--speculative-config", "note"),
        ("""-sc '{"method": "dspark"}' -pp 2""", "--speculative-config method dspark with --pipeline-parallel-size",
         "problem"),
    ],
)  # fmt: skip
def test_options_that_go_wrong(line: str, name: str, severity: str) -> None:
    assert names(line) == [(name, severity)]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "vllm serve model -tp 8 --block-size 128 --kv-cache-dtype fp8 --moe-backend marlin",
        "--kv-cache-dtype auto --kv_cache_dtype fp8_ds_mla",
        "--attention-backend ROCM_FLASHMLA_SPARSE_DSV41",
        "-pp 2",
        "-pp 1 --gpu-memory-utilization 0.9",
        """--speculative-config '{"method": "dspark", "num_speculative_tokens": 5}' -tp 8""",
        "--enable-expert-parallel -tp 8",
        """--engram-config '{"cpu_offload": true}'""",
    ],
)
def test_options_that_are_right(line: str) -> None:
    assert names(line) == []


@pytest.mark.parametrize(
    ("variable", "value", "severity"),
    [
        ("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "0", "problem"),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "0", "problem"),
        ("VLLM_USE_V2_MODEL_RUNNER", "0", "problem"),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8", "problem"),
        ("VLLM_PLE_CPU_OFFLOAD", "0", "note"),
        ("TRITON_INTERPRET", "1", "problem"),
        ("TRITON_OVERRIDE_ARCH", "sm80", "note"),
        ("VLLM_PP_LAYER_PARTITION", "14,14,12", "problem"),
        ("VLLM_PP_LAYER_PARTITION", "twenty", "problem"),
    ],
)
def test_variables_that_go_wrong(variable: str, value: str, severity: str) -> None:
    line = "-pp 3" if variable == "VLLM_PP_LAYER_PARTITION" else ""
    assert names(line, **{variable: value}) == [(f"{variable}={value}", severity)]


def test_variables_that_are_right() -> None:
    right = {
        "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": "True",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_PLE_CPU_OFFLOAD": "1",
        "VLLM_PP_LAYER_PARTITION": "8,12,20",
        "TRITON_INTERPRET": "0",
    }
    assert names("-pp 3", **right) == []


def test_before_033_a_legal_cut_is_refused_with_all_others() -> None:
    for stages in (None, 3):
        (found,) = settings.partition_findings("8,12,20", stages, "0.32.0")
        assert (found.name, found.severity) == ("--pipeline-parallel-size 3", "problem")
    both = settings.partition_findings("14,14,12", 3, "0.32.0")
    assert [one.name for one in both] == ["--pipeline-parallel-size 3", "VLLM_PP_LAYER_PARTITION=14,14,12"]
    assert list(settings.partition_findings("8,12,20", 3, "0.33.0")) == []


def test_a_first_stage_of_windows_alone_is_a_problem() -> None:
    (found,) = settings.partition_findings("2,38", 2, "0.33.0")
    assert "without a KV source" in found.text and found.hint == "VLLM_PP_LAYER_PARTITION=8,32"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--gpu-memory-utilization 1.5", "--gpu-memory-utilization 1.5"),
        ("--gpu-memory-utilization 0", "--gpu-memory-utilization 0"),
        ("--gpu_memory_utilization=-0.1", "--gpu-memory-utilization -0.1"),
        ("--gpu-memory-utilization nan", "--gpu-memory-utilization nan"),
        ("--gpu-memory-utilization 92%", "--gpu-memory-utilization 92%"),
        ("-tp 0", "--tensor-parallel-size 0"),
        ("-tp eight", "--tensor-parallel-size eight"),
        ("-tp", "--tensor-parallel-size true"),
        ("-pp 0", "--pipeline-parallel-size 0"),
        ("-dp -1", "--data-parallel-size -1"),
        ("--max-num-seqs 0", "--max-num-seqs 0"),
        ("--max-num-seqs 1K", "--max-num-seqs 1K"),
        ("--max-num-batched-tokens 8.5K", "--max-num-batched-tokens 8.5K"),
        ("--max-num-batched-tokens 128 --max-num-seqs 256", "--max-num-batched-tokens 128"),
        ("--max-model-len 2M", "--max-model-len 2M"),
        ("--max-model-len 1048577", "--max-model-len 1048577"),
        ("""-sc '{"method": "dspark", "num_speculative_tokens": 0}'""", "num_speculative_tokens 0"),
    ],
)
def test_numbers_that_vllm_refuses_are_problems(line: str, name: str) -> None:
    assert names(line) == [(name, "problem")]


@pytest.mark.parametrize(
    "line",
    [
        "--gpu-memory-utilization 0.95",
        "--max-model-len auto",
        "--max-model-len -1",
        "--max-model-len 1M",
        "--max-num-batched-tokens 8K --max-num-seqs 256",
        "--max-num-batched-tokens 25.6k",
    ],
)
def test_numbers_that_vllm_takes(line: str) -> None:
    assert names(line) == []


def test_no_gpus_at_all_do_not_end_the_other_checks() -> None:
    found = names("-tp 0 --engram-config.cpu-offload False")
    assert found == [("--tensor-parallel-size 0", "problem"), ("--engram-config cpu_offload false", "note")]


def test_a_share_of_all_is_a_note_as_one_of_nearly_all() -> None:
    assert names("--gpu-memory-utilization 1.0") == [("--gpu-memory-utilization 1", "note")]


def test_vllms_own_variable_allows_a_longer_context() -> None:
    assert names("--max-model-len 2M", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1") == []


def test_options_in_a_file_are_not_looked_at_and_this_is_said() -> None:
    assert names("--config serve.yaml") == [("--config serve.yaml", "note")]


def test_every_finding_has_a_source_and_stands_in_the_docs() -> None:
    text = DOCS.read_text()
    for variable in VARIABLES:
        assert variable[0] in text and variable[5]
    for option in ("--kv-cache-dtype", "--block-size", "--cpu-offload-gb", "--gpu-memory-utilization", "--attention-backend",
                   "--prefill-context-parallel-size", "--moe-backend", "--enable-expert-parallel", "--enable-dbo",
                   "--engram-config", "--enforce-eager", "enable_jit_warmup", "--tensor-parallel-size",
                   "--speculative-config", "VLLM_PP_LAYER_PARTITION", "--config", "--max-num-batched-tokens"):  # fmt: skip
        assert f"`{option}" in text, option


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0", "0.33.0"])
def test_the_releases_read_these_variables(version: str, pristine_release) -> None:
    known = (Path(pristine_release(version)) / "vllm" / "envs.py").read_text()
    for name, *_ in VARIABLES:
        if name.startswith("VLLM_") and not (name == "VLLM_PLE_CPU_OFFLOAD" and version != "0.30.0"):
            assert f'"{name}"' in known, name
    assert (
        "VLLM_PLE_CPU_OFFLOAD" in (Path(pristine_release(version)) / "vllm/config/engram.py").read_text()
    ) is (version == "0.30.0")


# option → the file and the line of it that sets the bounds
_BOUNDS = {
    "gpu-memory-utilization": ("config/cache.py", "gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)"),
    "tensor-parallel-size": ("config/parallel.py", "tensor_parallel_size: int = Field(default=1, ge=1)"),
    "pipeline-parallel-size": ("config/parallel.py", "pipeline_parallel_size: int = Field(default=1, ge=1)"),
    "data-parallel-size": ("config/parallel.py", "data_parallel_size: int = Field(default=1, ge=1)"),
    "prefill-context-parallel-size": ("config/parallel.py", "prefill_context_parallel_size: int = Field(default=1, ge=1)"),
    "decode-context-parallel-size": ("config/parallel.py", "decode_context_parallel_size: int = Field(default=1, ge=1)"),
    "max-num-batched-tokens": ("config/scheduler.py", "max_num_batched_tokens: int = Field(default=DEFAULT_MAX_NUM_BATCHED_TOKENS, ge=1)"),
    "max-num-seqs": ("config/scheduler.py", "max_num_seqs: int = Field(default=DEFAULT_MAX_NUM_SEQS, ge=1)"),
    "max-model-len": ("config/model.py", "max_model_len: int = Field(default=None, ge=-1)"),
}  # fmt: skip


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0", "0.33.0"])
def test_the_releases_set_these_bounds(version: str, pristine_release) -> None:
    root = Path(pristine_release(version)) / "vllm"
    assert {name for name, *_ in ranges.RANGES} == set(_BOUNDS)
    for file, text in _BOUNDS.values():
        assert text in (root / file).read_text(), text
    assert "self.max_num_batched_tokens < self.max_num_seqs" in (root / "config/scheduler.py").read_text()
    assert (
        "num_speculative_tokens: int = Field(default=None, gt=0)"
        in (root / "config/speculative.py").read_text()
    )


def test_several_stages_are_a_problem_before_033() -> None:
    assert names("-tp 4 -pp 2") == []
    for release in ("0.30.0", "0.31.0", "0.32.0"):
        given = {"VLLM_PP_LAYER_PARTITION": "14,26"}
        for line, environ in (("-tp 4 -pp 2", {}), ("-tp 4 -pp 2", given)):
            assert names(line, release, **environ) == [("--pipeline-parallel-size 2", "problem")]
        assert names("-tp 8 -pp 1", release) == names("-tp 8", release) == []
    (found,) = settings.check(Settings({}, {"pipeline-parallel-size": "2"}, "0.32.0"))
    assert "requires input_ids" in found.text and found.hint.endswith("or vLLM 0.33")
