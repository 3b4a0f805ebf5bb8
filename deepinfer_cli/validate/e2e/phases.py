"""What a child does with a running engine. Runs in the target's interpreter.

A phase is a JSON object: `name`, `do` (a function below), and what that function reads. Common to all: `chunk` (tokens
that one step may schedule, at most what the engine was started with), `plant` (a fault of the script's plugin), `after`
(a file to wait for) and `lock` (a file that one process at a time may hold).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# prompts use ordinary ids: those from here on are special, or mark images
_LAST_ID = 120_000
_WAIT_S = 900.0
# prompts and outputs of earlier phases, by phase
_SEEN: dict[str, list[tuple[list[int], list[int]]]] = {}


def describe(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What was started: versions, attention classes, what the overlay bound, KV cache, memory."""
    versions = {name: _version(name) for name in ("vllm", "torch", "triton", "tilelang")}
    core = _core(engine)
    cache = core.vllm_config.cache_config if core is not None else None
    blocks = getattr(getattr(core, "scheduler", None), "kv_cache_config", None)
    return {
        "versions": versions,
        "python": sys.version.split()[0],
        "workers": engine.collective_rpc(worker_facts),
        "kv_blocks": getattr(blocks, "num_blocks", None) or getattr(cache, "num_gpu_blocks", None),
        "max_model_len": engine.llm_engine.model_config.max_model_len,
    }


def worker_facts(worker: Any) -> dict[str, Any]:
    """Runs in each worker: the GPU, attention classes, the overlay's report, memory."""
    import torch

    inner = getattr(worker, "worker", worker)
    model = inner.model_runner.get_model()
    classes = {
        f"{type(module).__module__}.{type(module).__qualname__}"
        for module in model.modules()
        if "Attention" in type(module).__name__ or "Indexer" in type(module).__name__
    }
    payload = sys.modules.get("vllm.deepinfer_sm80")
    loaded = sorted(name for name in sys.modules if name.startswith("vllm.deepinfer_sm80"))
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "classes": sorted(classes),
        "report": payload.report() if payload is not None else None,
        "payload_modules": loaded,
        "held": _held_by_vllm(payload) if payload is not None else [],
        "memory_bytes": torch.cuda.memory_allocated(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "runner": type(inner.model_runner).__module__,
        "one_stream": _one_stream(inner.model_runner),
    }


def _one_stream(runner: Any) -> bool:
    """Whether pipeline stages exchange tokens in the order of the stream that the model runs on."""
    import torch

    handler = getattr(runner, "pp_handler", None)
    return handler is None or bool(handler.main_stream == torch.cuda.current_stream())


def _held_by_vllm(payload: Any) -> list[str]:
    """The names of loaded vLLM modules that hold an object of ours."""
    bindings = sys.modules.get(f"{payload.__name__}.bindings")
    if bindings is None:
        return []
    found = []
    for name, module in sorted(sys.modules.items()):
        if name.startswith("vllm.") and not name.startswith(payload.__name__):
            held = list(getattr(module, "__dict__", {}).items())
            found += [f"{name}.{symbol}" for symbol, value in held if bindings.is_ours(value)]
    return found


def reset_peak(worker: Any) -> None:
    """Runs in each worker."""
    import torch

    torch.cuda.reset_peak_memory_stats()


def peak(worker: Any) -> int:
    """Runs in each worker: most bytes that PyTorch had allocated since `reset_peak`."""
    import torch

    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def run(engine: Any, phase: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """A phase's result, with its seconds and each worker's peak memory."""
    wait_for(phase.get("after"))
    engine.collective_rpc(reset_peak)
    began = time.perf_counter()
    with _lock(phase.get("lock")), _chunk(engine, phase.get("chunk")), _planted(engine, phase.get("plant")):
        result = DO[phase["do"]](engine, phase)
    result["took_s"] = round(time.perf_counter() - began, 3)
    result["peak_bytes"] = engine.collective_rpc(peak)
    return result


def wait_for(path: str | None) -> None:
    """Returns when the file `path` is there.

    Raises:
        TimeoutError: it does not come.
    """
    until = time.monotonic() + _WAIT_S
    while path and not Path(path).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} did not come within {_WAIT_S:g} s")
        time.sleep(0.1)


@contextlib.contextmanager
def _lock(path: str | None) -> Iterator[None]:
    if not path:
        yield
        return
    with Path(path).open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _chunk(engine: Any, tokens: int | None) -> Iterator[None]:
    """Within the context a step schedules at most `tokens` tokens; the engine runs in this process."""
    if not tokens:
        yield
        return
    core = _core(engine)
    if core is None:
        raise RuntimeError("the scheduler is in another process: its chunk size cannot be changed")
    before = core.scheduler.max_num_scheduled_tokens
    core.scheduler.max_num_scheduled_tokens = min(tokens, before)
    try:
        yield
    finally:
        core.scheduler.max_num_scheduled_tokens = before


@contextlib.contextmanager
def _planted(engine: Any, name: str | None) -> Iterator[None]:
    if not name:
        yield
        return
    undo = sys.modules["deepinfer_e2e_plugin"].plant(name, engine)
    try:
        yield
    finally:
        undo()


def _core(engine: Any) -> Any:
    return getattr(getattr(engine.llm_engine, "engine_core", None), "engine_core", None)


def _version(name: str) -> str | None:
    try:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except ImportError:
        return None


def tokens_of(length: int, seed: int) -> list[int]:
    """A prompt of `length` ids; the same for the same seed everywhere."""
    source = random.Random(seed)
    return [source.randrange(5, _LAST_ID) for _ in range(length)]


def generate(engine: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """Greedy decoding of prompts of `lengths` tokens, `tokens` each, in one batch; then the same tokens as a prompt.

    Short prompts decode while long ones are still being filled in. Reads `seed`, and `plain`: the first time without
    the prompts' log-probabilities, as a server runs it, where vLLM may leave rows of the last layers out.
    """
    prompts = [tokens_of(length, phase.get("seed", 1) * 100_003 + length) for length in phase["lengths"]]
    scored = {} if phase.get("plain") else {"prompt_logprobs": 0}
    outputs = _generate(engine, prompts, phase["tokens"], **scored)
    seen = [(prompt, list(out.outputs[0].token_ids)) for prompt, out in zip(prompts, outputs, strict=True)]
    _SEEN[phase["name"]] = seen
    again = _generate(engine, [prompt + out for prompt, out in seen], 1, prompt_logprobs=0)
    return {"rows": [_row(*three) for three in zip(prompts, outputs, again, strict=True)]}


def score(engine: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """The prompts and outputs of the phase `of` again as prompts: with another `chunk`, say."""
    seen = _SEEN[phase["of"]]
    outputs = _generate(engine, [prompt + out for prompt, out in seen], 1, prompt_logprobs=0)
    return {
        "rows": [
            {"length": len(prompt), "nll": _nll(output)[: len(prompt) - 1]}
            for (prompt, _), output in zip(seen, outputs, strict=True)
        ]
    }


def prefix(engine: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """A second request that begins with the first one's prompt, decoded from the cache; then scored without it.

    Without window replay vLLM keeps the window's keys at the end of a prompt only: another shared part has no hit.
    """
    shared = tokens_of(phase["shared"], 17)
    _generate(engine, [shared], 4)
    prompt = shared + tokens_of(phase["own"], 19)
    (cached,) = _generate(engine, [prompt], phase["tokens"])
    (scored,) = _generate(engine, [prompt + list(cached.outputs[0].token_ids)], 1, prompt_logprobs=0)
    row = _row(prompt, cached, scored)
    return {"cached_tokens": int(cached.num_cached_tokens or 0), "rows": [row | {"nll": []}]}


def far(engine: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """One prompt of `length` tokens, `tokens` decoded after it; then the last of them predicted by a prefill."""
    prompt = tokens_of(phase["length"], 23)
    (first,) = _generate(engine, [prompt], phase["tokens"], logprobs=20)
    out = list(first.outputs[0].token_ids)
    (second,) = _generate(engine, [prompt + out[:-1]], 1, logprobs=20)
    return {
        "length": len(prompt),
        "tokens": out,
        "first": _top(first.outputs[0].logprobs[0]),
        "last_decoded": _top(first.outputs[0].logprobs[-1]),
        "last_prefilled": _top(second.outputs[0].logprobs[0]),
        "cached_tokens": int(second.num_cached_tokens or 0),
    }


def timing(engine: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a prompt of `prefill` tokens, and of a decode step of each batch size.

    Prompts are new each time, so nothing comes from the prefix cache. With `kernels` also what the GPU alone was busy for,
    in one prompt more of each kind, and with which kernels.
    """
    repeats, steps, context = phase.get("repeats", 3), phase["steps"], phase["context"]
    seeds = iter(range(phase.get("seed", 1) * 1_000_003, 10**12))

    def elapsed(batch: int, length: int, count: int) -> float:
        prompts = [tokens_of(length, next(seeds)) for _ in range(batch)]
        began = time.perf_counter()
        _generate(engine, prompts, count, logprobs=None)
        return (time.perf_counter() - began) * 1_000.0

    elapsed(1, phase["prefill"], 1)
    result: dict[str, Any] = {
        "prefill_ms": _spread([elapsed(1, phase["prefill"], 1) for _ in range(repeats)])
    }
    for batch in phase["batches"]:
        elapsed(batch, context, 2)
        whole = [elapsed(batch, context, steps + 1) - elapsed(batch, context, 1) for _ in range(repeats)]
        result[f"decode_{batch}_ms"] = _spread([value / steps for value in whole])
    if phase.get("kernels"):
        result |= _busy("prefill", 1, lambda: elapsed(1, phase["prefill"], 1))
        for batch in phase["batches"]:
            result |= _busy(f"decode_{batch}", steps, functools.partial(elapsed, batch, 1, steps + 1))
    return result


def _busy(name: str, steps: int, work: Callable[[], Any]) -> dict[str, Any]:
    """GPU time of `work` in ms per step, and its longest kernels; what PyTorch's profiler said instead, where it cannot."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work()
            torch.cuda.synchronize()
        found = [(one.key, one.self_device_time_total / 1_000.0, one.count) for one in seen.key_averages()]
    except RuntimeError as error:
        return {f"{name}_kernels": str(error)}
    found.sort(key=lambda one: -one[1])
    total = sum(one[1] for one in found) / steps
    shown = [[key[:120], round(spent / steps, 5), count] for key, spent, count in found[:40]]
    return {f"{name}_gpu_ms": {"median": round(total, 4)}, f"{name}_kernels": shown}


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def _generate(engine: Any, prompts: list[list[int]], count: int, **more: Any) -> Any:
    from vllm import SamplingParams

    settings = {"logprobs": 5, **more}
    parameters = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **settings
    )
    return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)


def _row(prompt: list[int], output: Any, again: Any) -> dict[str, Any]:
    """NLL of the prompt, what was decoded, and the differences of its log-probabilities to the prefill's."""
    out = list(output.outputs[0].token_ids)
    decoded = [place[token].logprob for token, place in zip(out, output.outputs[0].logprobs, strict=True)]
    prefilled = [-value for value in _nll(again)[len(prompt) - 1 :]]
    return {
        "length": len(prompt),
        "nll": _nll(output) or _nll(again)[: len(prompt) - 1],
        "tokens": out,
        "decoded": [_rounded(value) for value in decoded],
        "prefilled": prefilled,
    }


def _nll(output: Any) -> list[float]:
    """Minus log-probability of each prompt token from the second on; empty where none was asked for."""
    places = output.prompt_logprobs or []
    ids = output.prompt_token_ids
    return (
        [_rounded(-place[token].logprob) for token, place in zip(ids[1:], places[1:], strict=True)]
        if places
        else []
    )


def _top(place: Any) -> dict[str, float]:
    return {str(token): _rounded(value.logprob) for token, value in place.items()}


def _rounded(value: float) -> float:
    return round(value, 5) if math.isfinite(value) else value


DO = {"generate": generate, "score": score, "prefix": prefix, "far": far, "time": timing}
