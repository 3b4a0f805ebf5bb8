"""The command lines and variables of `vllm serve` and `vllm bench serve`; the options are those of vLLM 0.30 to 0.33."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_cli.validate.e2e import child, model
from deepinfer_cli.validate.e2e import plan as e2e
from deepinfer_cli.validate.serving.plan import (
    DECODE_INPUT_TOKENS,
    PIECE_TOKENS,
    Bench,
    Request,
    Side,
    Workload,
    has_option,
    value_of,
)  # fmt: skip
from deepinfer_cli.validate.serving.process import HOST

MODEL, TOKENIZER = "model", "tokenizer"
# of the small model's vocabulary: those from here on are special, or mark images
ORDINARY_IDS = 120_000
LAUNCH = Path(__file__).with_name("launch.py")
# each of two servers on one card, with room for what is not counted
SHARED_UTILIZATION = "0.44"
SMALL_KV_BYTES = 2 * e2e.GIB
SMALL_BATCHED_TOKENS = 4_096
# the client needs them too; the value that follows goes along
_SHARED_WITH_CLIENT = ("--tokenizer", "--tokenizer-mode", "--trust-remote-code")
_DECIDING = (
    "DEEPINFER_", "TRITON_OVERRIDE_ARCH", "TRITON_INTERPRET", "VLLM_API_KEY", "VLLM_CONFIGURE_LOGGING",
    "VLLM_LOGGING_CONFIG_PATH",
)  # fmt: skip
_SMALL_SETTINGS = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def small_arguments(request: Request) -> list[str]:
    """`vllm serve`'s arguments for the small model: CUDA graphs, Engram, and DSpark as it is served."""
    longest = max((*request.input_lengths, DECODE_INPUT_TOKENS + request.output_tokens, PIECE_TOKENS))
    run = e2e.Run("", e2e.CONFIGURATIONS["draft"], memory_bytes=request.memory_bytes)
    engine = run.engine() | {
        "max_model_len": served_length(longest), "max_num_batched_tokens": SMALL_BATCHED_TOKENS,
        "kv_cache_memory_bytes": SMALL_KV_BYTES, "kernel_config": {"enable_jit_warmup": False},
        "load_format": child.LOADER,
    }  # fmt: skip
    # the benchmark's prompts are text
    engine.pop("skip_tokenizer_init")
    return flags(engine)


def served_length(tokens: int) -> int:
    """The context that the small model is served with for sequences of `tokens`.

    vLLM refuses a text of more characters than its longest word times the context, unread; here words are nearly equally
    long, and parted by spaces.
    """
    return tokens * 5 // 4 + 64


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Keyword arguments of vLLM's `LLM` as options of `vllm serve`."""
    words: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def small_model(request: Request) -> model.ModelOptions:
    """Which small model; its positions are its own, whatever is served of them."""
    return e2e.CONFIGURATIONS["draft"].model


def serve_command(request: Request, side: Side, port: int, folder: Path) -> list[str]:
    """The command of one server; what it needs prepared is written to `folder`."""
    served = request.model or ""
    start = [str(request.python), "-m", "vllm.entrypoints.cli.main"]
    words: list[str] = []
    if request.small:
        served = str(folder / MODEL)
        model.write(Path(served), small_model(request))
        _write_client_tokenizer(folder / TOKENIZER)
        words += small_arguments(request)
    elif request.together and not _memory_given(request.extra):
        words += ["--gpu-memory-utilization", SHARED_UTILIZATION]
    if request.small or request.generate:
        start = [str(request.python), str(LAUNCH), str(_write_preparation(request, folder))]
    if not has_option(request.extra, "--served-model-name"):
        words += ["--served-model-name", request.served_name(side)]
    return [*start, "serve", served, "--host", HOST, "--port", str(port), *words, *request.extra]


def _write_client_tokenizer(folder: Path) -> None:
    """The same tokenizer with ordinary words alone: random prompts must not have words that mark images."""
    content = model.tokenizer()
    words = {word: index for word, index in content["model"]["vocab"].items() if index < ORDINARY_IDS}
    content["model"]["vocab"] = words
    folder.mkdir(parents=True, exist_ok=True)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer": content, "tokenizer_config": kind, "config": model.config(model.ModelOptions())}
    for name, written in files.items():
        (folder / f"{name}.json").write_text(json.dumps(written), encoding="utf-8")


def _memory_given(extra: Sequence[str]) -> bool:
    return any(has_option(extra, name) for name in ("--gpu-memory-utilization", "--kv-cache-memory-bytes"))


def _write_preparation(request: Request, folder: Path) -> Path:
    """The request that `e2e/child.py` prepares a process by."""
    path = folder / "prepare.json"
    capability = list(e2e.CAPABILITIES[request.arch]) if request.arch and request.generate else None
    content = {
        "parent": str(request.parent) if request.parent else None,
        "out": str(folder),
        "capability": capability,
        "plugin": None,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def environment(
    request: Request, side: Side | None, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables of a server, or with None of the client: this process's, less those that would decide what runs."""
    given = os.environ if given is None else given
    env = {name: value for name, value in given.items() if not name.startswith(_DECIDING)}
    env["PYTHONUNBUFFERED"] = "1"
    if request.small:
        env |= _SMALL_SETTINGS
    if request.parent is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(request.parent), env.get("PYTHONPATH")]))
    if side is None:
        # aiohttp would take a proxy to this machine's own servers
        hosts = (env.get("no_proxy") or env.get("NO_PROXY") or "").split(",")
        env["no_proxy"] = env["NO_PROXY"] = ",".join(filter(None, [*hosts, HOST, "localhost"]))
        return env
    if env.get("VLLM_LOGGING_LEVEL", "").upper() != "DEBUG":
        env["VLLM_LOGGING_LEVEL"] = "INFO"  # the overlay says at this level what it bound
    if request.arch is not None and request.generate:
        env["DEEPINFER_FORCE_ARCH"] = env["TRITON_OVERRIDE_ARCH"] = request.arch
    if side.off:
        env["DEEPINFER_DISABLE_OPS"] = ",".join(sorted(side.off))
    return env


def bench_arguments(
    bench: Bench, request: Request, base_url: str, results: Path, prompts: Path | None
) -> list[str]:
    """The options of one `vllm bench serve`.

    Args:
        results: folder for the result file.
        prompts: file of the decode prompts, where they are not random.
    """
    work = bench.workload
    words = [
        "--backend", "openai", "--base-url", base_url, "--endpoint", "/v1/completions",
        *_model_arguments(request, bench.side, results), *_dataset(work, prompts),
        "--num-prompts", str(work.streams), "--max-concurrency", str(work.streams),
        "--seed", str(bench.seed), "--temperature", "0", "--ignore-eos", "--disable-tqdm",
        # a request to see whether the server is there would leave the prompt in its cache
        "--ready-check-timeout-sec", "0", "--num-warmups", "0",
        "--save-result", "--save-detailed", "--result-dir", str(results), "--result-filename", f"{bench.id}.json",
    ]  # fmt: skip
    return words


def bench_request(
    bench: Bench, request: Request, base_url: str, results: Path, prompts: Path | None
) -> dict[str, Any]:
    """The same as the client reads it."""
    return {
        "id": bench.id,
        "arguments": bench_arguments(bench, request, base_url, results, prompts),
        "base_url": base_url,
        "result": str(results / f"{bench.id}.json"),
    }


def _model_arguments(request: Request, side: Side, results: Path) -> list[str]:
    if not request.started:
        # without a model the benchmark asks the server for it
        return ["--model", request.model] if request.model else []
    served = str(results.parent / side.name / MODEL) if request.small else str(request.model)
    words = ["--model", served, "--served-model-name", request.served_name(side)]
    if request.small:
        words += ["--tokenizer", str(results.parent / side.name / TOKENIZER)]
    for name in _SHARED_WITH_CLIENT:
        if has_option(request.extra, name):
            value = value_of(request.extra, name)
            words += [name] if name == "--trust-remote-code" else [name, str(value)]
    return words


def _dataset(work: Workload, prompts: Path | None) -> list[str]:
    if work.prompts == "random":
        return [
            "--dataset-name", "random", "--random-input-len", str(work.input_tokens),
            "--random-output-len", str(work.output_tokens),
        ]  # fmt: skip
    if work.prompts == "custom":
        return [
            # as they are: V4.1's chat format is vLLM's own, and no template of the tokenizer's
            "--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template",
            "--custom-output-len", str(work.output_tokens),
        ]  # fmt: skip
    return [
        "--dataset-name", "sharegpt", "--dataset-path", str(prompts), "--sharegpt-output-len",
        str(work.output_tokens),
    ]  # fmt: skip
