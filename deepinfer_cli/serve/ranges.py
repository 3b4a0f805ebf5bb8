"""Numbers in a `vllm serve` line that vLLM itself refuses, by the constraints of its own configuration classes (0.30 to 0.33)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from deepinfer_cli.planner.shape import FLASH

POSITIONS = FLASH.positions
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_READABLE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A number that stops vLLM: the option, what is wrong with it, what is right, and the file that checks it."""

    name: str
    text: str
    hint: str
    source: str


def readable(text: str) -> int:
    """A number as vLLM reads it: `8192`, `8k` (8,000), `8K` (8,192). Source: `utils/argparse_utils.py`, `human_readable_int`.

    Raises:
        ValueError: it is none.
    """
    found = _READABLE.fullmatch(text.strip())
    if found is None:
        return int(text)
    number, unit = found.groups()
    return int(float(number) * _UNITS[unit]) if unit.islower() else int(number) * _UNITS[unit]


def length(text: str) -> int | None:
    """A context length; None where vLLM chooses one (`auto`, `-1`).

    Raises:
        ValueError: it is none.
    """
    return None if text.strip().lower() in ("auto", "-1") else readable(text)


Parser = Callable[[str], float | None]
# option, parser, in words, least (None: above 0), most, source
RANGES: tuple[tuple[str, Parser, str, int | None, int | None, str], ...] = (
    ("gpu-memory-utilization", float, "a share above 0, at most 1", None, 1, "vllm/config/cache.py, gpu_memory_utilization"),
    ("tensor-parallel-size", int, "a whole number", 1, None, "vllm/config/parallel.py, tensor_parallel_size"),
    ("pipeline-parallel-size", int, "a whole number", 1, None, "vllm/config/parallel.py, pipeline_parallel_size"),
    ("data-parallel-size", int, "a whole number", 1, None, "vllm/config/parallel.py, data_parallel_size"),
    ("prefill-context-parallel-size", int, "a whole number", 1, None,
     "vllm/config/parallel.py, prefill_context_parallel_size"),
    ("decode-context-parallel-size", int, "a whole number", 1, None,
     "vllm/config/parallel.py, decode_context_parallel_size"),
    ("max-num-batched-tokens", readable, "a whole number, such as 8192 or 8K", 1, None,
     "vllm/config/scheduler.py, max_num_batched_tokens"),
    ("max-num-seqs", int, "a whole number", 1, None, "vllm/config/scheduler.py, max_num_seqs"),
    ("max-model-len", length, "a whole number, such as 131072 or 128K, or auto", 1, POSITIONS,
     "vllm/config/model.py, _get_and_verify_max_len"),
)  # fmt: skip


def refusals(options: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Refusal]:
    """The numbers in `options` that vLLM refuses."""
    long = environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").strip().lower() in ("1", "true")
    for name, parser, right, least, most, source in RANGES:
        if name not in options:
            continue
        wrong = _wrong(options[name], parser, least, None if long and most == POSITIONS else most)
        if wrong:
            yield Refusal(f"--{name} {options[name]}", f"vLLM refuses it: {wrong}", right, source)
    yield from _fewer_tokens_than_sequences(options)


def _wrong(text: str, parser: Parser, least: int | None, most: int | None) -> str:
    try:
        value = parser(text)
    except ValueError:
        return "it is no such number"
    if value is None:
        return ""
    if math.isnan(value) or (value <= 0 if least is None else value < least):
        return "it is not above 0" if least is None else f"it is less than {least}"
    return f"it is more than {most:,}" if most is not None and value > most else ""


def _fewer_tokens_than_sequences(options: Mapping[str, str]) -> Iterator[Refusal]:
    try:
        tokens, sequences = readable(options["max-num-batched-tokens"]), int(options["max-num-seqs"])
    except (KeyError, ValueError):
        return
    if 0 < tokens < sequences:
        yield Refusal(
            f"--max-num-batched-tokens {tokens}", f"vLLM refuses it: it is less than --max-num-seqs {sequences}",
            "more tokens, or fewer sequences", "vllm/config/scheduler.py, verify_max_model_len",
        )  # fmt: skip
