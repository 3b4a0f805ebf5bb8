"""Settings of a `vllm serve` that go wrong with DeepSeek-V4.1 on SM8x: environment variables and options, each with its source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_cli.serve import memory, partition, ranges
from deepinfer_cli.serve.variables import VARIABLES, Severity, off

SERVED_BACKENDS = frozenset({"ROCM_FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV41"})
# the largest --gpu-memory-utilization that no card is known to have run out of memory at
MOST_SHARE = 0.95
_NO_KERNELS = ("deep_gemm", "flashinfer", "cutlass", "aiter", "b12x", "flydsl", "rdna", "hpc")


@dataclass(frozen=True, slots=True)
class Finding:
    """A setting that goes wrong.

    Attributes:
        name: the variable or the option.
        severity: `problem` stops vLLM or its answers; `note` costs speed, memory or surprises.
        text: what happens.
        hint: what to do.
        source: where that is known from: a file of vLLM's, or an issue.
    """

    name: str
    severity: Severity
    text: str
    hint: str
    source: str


@dataclass(frozen=True)
class Settings:
    """What a server is started with.

    Attributes:
        environ: its environment.
        options: long option name without dashes → value; `true` for a switch.
        release: vLLM's version.
    """

    environ: Mapping[str, str]
    options: Mapping[str, str]
    release: str = "0.33.0"

    def number(self, name: str, default: int = 1) -> int:
        """The option `name` as a number; `default` where it is none."""
        value = self.options.get(name, "")
        return int(value) if value.isdecimal() else default

    def json(self, name: str) -> dict[str, Any]:
        """The option `name` as JSON, with its `name.key` options; empty where it is neither."""
        try:
            found = json.loads(self.options.get(name, "{}"))
        except ValueError:
            found = {}
        found = dict(found) if isinstance(found, dict) else {}
        for key, value in self.options.items():
            if key.startswith(f"{name}."):
                found[key[len(name) + 1 :].replace("-", "_")] = value
        return found


def check(settings: Settings) -> list[Finding]:
    """Every setting that goes wrong, in a fixed order."""
    return [finding for rule in RULES for finding in rule(settings)]


def _environment(settings: Settings) -> Iterator[Finding]:
    for name, wrong, severity, text, hint, source in VARIABLES:
        value = settings.environ.get(name)
        if value is not None and wrong(value):
            yield Finding(f"{name}={value}", severity, text, hint, source)


def _numbers(settings: Settings) -> Iterator[Finding]:
    for one in ranges.refusals(settings.options, settings.environ):
        yield Finding(one.name, "problem", one.text, one.hint, one.source)
    number = settings.json("speculative-config").get("num_speculative_tokens")
    # vLLM raises below 1; None means the model's own
    if isinstance(number, (int, float)) and number < 1:
        yield Finding(f"num_speculative_tokens {number}", "problem", "vLLM refuses it: it is less than 1", "1 or more",
                      "vllm/config/speculative.py, num_speculative_tokens")  # fmt: skip


def _file(settings: Settings) -> Iterator[Finding]:
    if "config" in settings.options:
        name = settings.options["config"]
        yield Finding(f"--config {name}", "note", "the options in that file were not looked at",
                      "give them in --serve as options", "vllm/utils/argparse_utils.py")  # fmt: skip


def _cache(settings: Settings) -> Iterator[Finding]:
    dtype = settings.options.get("kv-cache-dtype")
    if dtype is not None and dtype not in ("auto", "fp8", "fp8_ds_mla"):
        why = (
            "its records are read on compute capability 10.x only"
            if dtype == "nvfp4_ds_mla"
            else "it is not a record of this model"
        )
        yield Finding(f"--kv-cache-dtype {dtype}", "problem", f"vLLM raises: {why}", "--kv-cache-dtype fp8",
                      "models/deepseek_v41/attention.py, _resolve_dsv4_kv_cache_dtype")  # fmt: skip
    size = settings.options.get("block-size")
    if size is not None and size != "128":
        yield Finding(f"--block-size {size}", "problem", "the indexer's cache on SM8x has blocks of 128 and no other",
                      "--block-size 128", "v1/attention/backends/mla/indexer.py, get_supported_kernel_block_sizes")  # fmt: skip
    if "cpu-offload-gb" in settings.options:
        yield Finding("--cpu-offload-gb", "note", "the V2 model runner may leave it without effect, and say nothing",
                      "plan with the weights on the GPUs", "vLLM issue 48468")  # fmt: skip
    try:
        share = float(settings.options.get("gpu-memory-utilization", "0"))
    except ValueError:
        share = 0.0
    yield from share_findings(share)


def share_findings(share: float) -> Iterator[Finding]:
    """What is known to happen at `--gpu-memory-utilization share`; what vLLM refuses is `ranges`' to say."""
    if MOST_SHARE < share <= 1:
        yield Finding(f"--gpu-memory-utilization {share:g}", "note",
                      "with DSpark or long prompts cards ran out of memory at that share", "0.92 or less",
                      "wtdcode/vllm-backport issue 24")  # fmt: skip


def _attention(settings: Settings) -> Iterator[Finding]:
    config = settings.json("attention-config")
    backend = settings.options.get("attention-backend") or config.get("backend")
    if backend and str(backend) not in SERVED_BACKENDS:
        yield Finding(f"--attention-backend {backend}", "problem", "it has no kernels for this model on SM8x",
                      "leave it unset", "models/deepseek_v41/nvidia/model.py, _select_dsv4_attn_cls")  # fmt: skip
    if settings.number("prefill-context-parallel-size") > 1:
        yield Finding("--prefill-context-parallel-size", "problem", "it needs FlashMLA, which has no kernels for SM8x",
                      "leave it at 1", "models/deepseek_v41/nvidia/model.py, _select_dsv4_attn_cls")  # fmt: skip


def _experts(settings: Settings) -> Iterator[Finding]:
    backend = settings.options.get("moe-backend", "auto").replace("-", "_").lower()
    if any(part in backend for part in _NO_KERNELS):
        yield Finding(f"--moe-backend {backend}", "problem", "it has no MXFP4 kernels for SM8x", "--moe-backend marlin",
                      "fused_moe/oracle/mxfp4.py")  # fmt: skip
    elif backend not in ("auto", "marlin"):
        yield Finding(f"--moe-backend {backend}", "note", "only Marlin's MXFP4 experts are known to run on SM8x",
                      "--moe-backend marlin", "fused_moe/oracle/mxfp4.py")  # fmt: skip
    if "enable-expert-parallel" in settings.options and settings.number("data-parallel-size") > 1:
        yield Finding("--enable-expert-parallel with --data-parallel-size", "note",
                      "it turns on sequence parallelism, which nobody has tried with this attention class",
                      "one of the two", "models/deepseek_v41/nvidia/model.py, _use_sequence_parallel")  # fmt: skip
    if "enable-dbo" in settings.options:
        yield Finding("--enable-dbo", "problem", "Engram does not support microbatches: vLLM raises", "leave it out",
                      "vllm/config/vllm.py, _resolve_and_verify_engram_config")  # fmt: skip


def _engram(settings: Settings) -> Iterator[Finding]:
    if off(settings.json("engram-config").get("cpu_offload", True)):
        each = memory.ENGRAM / max(settings.number("tensor-parallel-size"), 1)
        yield Finding("--engram-config cpu_offload false", "note", f"Engram's tables take {each:.1f} GiB of each GPU that has them",
                      'leave them in the host\'s memory: {"cpu_offload": true}', "vllm/config/engram.py")  # fmt: skip


def _kernels(settings: Settings) -> Iterator[Finding]:
    if "enforce-eager" in settings.options:
        yield Finding("--enforce-eager", "note",
                      "no CUDA graphs, and no warm-up: kernels are compiled while the first requests wait",
                      "leave it out", "vllm/config/vllm.py")  # fmt: skip
    elif off(settings.json("kernel-config").get("enable_jit_warmup", True)):
        yield Finding("enable_jit_warmup off", "note",
                      "kernels are compiled while the first requests wait; the overlay's fp8_pack makes it needless",
                      "leave it on", "model_executor/warmup/kernel_warmup.py; vLLM issue 41834")  # fmt: skip


def _layout(settings: Settings) -> Iterator[Finding]:
    tp, pp = settings.number("tensor-parallel-size"), settings.number("pipeline-parallel-size")
    if tp > 0 and tp not in memory.TENSOR_PARALLEL:
        yield Finding(f"--tensor-parallel-size {tp}", "problem",
                      "64 heads and 8 output groups are not split evenly by it", "1, 2, 4 or 8",
                      "models/deepseek_v41/attention.py, DeepseekV4Attention.__init__")  # fmt: skip
    given = settings.environ.get(partition.VARIABLE)
    if given is not None and "pipeline-parallel-size" not in settings.options:
        return
    if pp > 0:
        yield from partition_findings(given, pp, settings.release)


def partition_findings(given: str | None, stages: int | None, release: str) -> Iterator[Finding]:
    """What is wrong with `VLLM_PP_LAYER_PARTITION=given`, or with vLLM's equal stages where it is None."""
    source = "vllm/distributed/utils.py, get_pp_indices; models/deepseek_v41/attention.py"
    if given is None:
        if stages is None or stages == 1:
            return
        verdict, name = partition.check(partition.even(stages)), f"{stages} equal stages"
    else:
        try:
            verdict, name = partition.check(partition.parse(given), stages), f"{partition.VARIABLE}={given}"
        except ValueError as error:
            yield Finding(f"{partition.VARIABLE}={given}", "problem", str(error), "20,20", source)
            return
    count = stages or len(verdict.partition)
    if count > 1 and (why := partition.no_stages(release)):
        yield Finding(f"--pipeline-parallel-size {count}", "problem", why,
                      "one stage: --tensor-parallel-size alone; or vLLM 0.33", "v1/worker/gpu/model_runner.py")  # fmt: skip
    if not verdict.legal:
        near = verdict.nearest
        hint = (
            f"{partition.VARIABLE}={partition.text(near)}"
            if near
            else f"at most {partition.MAX_STAGES} stages"
        )
        yield Finding(name, "problem", verdict.reason, hint, source)


def _speculation(settings: Settings) -> Iterator[Finding]:
    config = settings.json("speculative-config")
    method = config.get("method")
    if "speculative-config" in settings.options and not config:
        yield Finding("--speculative-config", "note", "it is not read as JSON here: the shell may have taken its quotes",
                      "single quotes around it", "wtdcode/vllm-backport issue 16")  # fmt: skip
    if method == "mtp":
        yield Finding("--speculative-config method mtp", "problem", "this model has DSpark stages and no MTP draft: vLLM raises",
                      'method "dspark"', "vllm/config/speculative.py")  # fmt: skip
    if method and settings.number("pipeline-parallel-size") > 1:
        yield Finding(f"--speculative-config method {method} with --pipeline-parallel-size", "problem",
                      "vLLM 0.30 to 0.33 raises: this model does not hand the drafter's inputs from stage to stage",
                      "one stage, or no speculation",
                      "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, verify_supports_aux_hidden_states_over_pp")  # fmt: skip


RULES = (
    _environment,
    _file,
    _numbers,
    _cache,
    _attention,
    _experts,
    _engram,
    _kernels,
    _layout,
    _speculation,
)
