"""Workloads of `engram`: cases, tables, and the oracle's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..spec import Case, Tolerance, case_maker
from . import engram, reference

OP = "engram"
TOLERANCES = {"out": Tolerance()}
SENTINEL = -24576.0


_case = case_maker(OP)
_SMOKE = (
    _case("one-token", tokens=1),
    _case("no-tokens", tokens=0),
    _case("every-code-at-every-scale", tokens=43, heads=24, all_heads=24, rows=1032, codes="all"),
    _case("what-the-checkpoint-holds", tokens=9, codes="usual"),
    _case("second-rank-of-two", tokens=13, heads=12, all_heads=24, head_start=12, vocab_start=700),
    _case("last-rank-has-fewer-heads", tokens=13, heads=5, all_heads=24, head_start=20, vocab_start=700),
    _case("dead-tokens-and-others-rows", tokens=40, foreign=0.6, vocab_start=900),
    _case("nothing-owned", tokens=7, foreign=1.0),
    _case("range-within-the-table", tokens=20, rows=500, vocab_rows=300, foreign=0.5),
    _case("one-layer-of-the-hashes", tokens=11, layers=2),
    _case("staging-longer-than-the-batch", tokens=11, row_gap=1024),
    _case("odd-out-stride", tokens=11, row_gap=3),
    _case("odd-table-address", tokens=11, shift=1),
    _case("rows-of-64", tokens=11, dim=64),
    _case("rows-of-160", tokens=11, dim=160),
    _case("rows-of-512", tokens=5, dim=512),
    _case("beside-the-decoder", tokens=33, background=True),
    _case("parts-of-four-ranks", tokens=21, parts=4, rows=301, foreign=0.2),
    _case("parts-of-three-ranks-odd-rows", tokens=11, parts=3, rows=100, dim=96),
    _case("uint8-codes", tokens=3, raw=True),
)
_FULL = (
    _case("8192-tokens", "full", tokens=8192, rows=100_000, gpu_only=True),
    _case("decode-batch", "full", tokens=96, rows=100_000, background=True, gpu_only=True),
    _case("host-table", "full", tokens=700, rows=50_000, host=True, gpu_only=True),
    _case("parts-of-eight-ranks", "full", tokens=3000, rows=80_003, parts=8, gpu_only=True),
    # rows, bytes and ids beyond 2^31 bytes
    _case("table-over-4GiB", "full", tokens=300, rows=18_000_000, last=True, codes="usual", gpu_only=True, memory_bytes=6 << 30),
    _case("a-million-tokens", "full", tokens=1 << 20, heads=3, all_heads=3, rows=5000, codes="usual", gpu_only=True,
          memory_bytes=2 << 30),
)  # fmt: skip


def cases(suite: str = "full") -> tuple[Case, ...]:
    """The cases of a suite; `full` contains `smoke`."""
    return _SMOKE if suite == "smoke" else _SMOKE + _FULL


def bench_cases() -> tuple[Case, ...]:
    """24 heads of 256, as in V4.1; a table on the GPU, too large for its caches."""
    shared: dict[str, Any] = {"rows": 4_000_000, "codes": "usual", "gpu_only": True}
    return tuple(_case(f"{n}-tokens", "bench", tokens=n, **shared) for n in (1, 24, 2048, 8192))


def make_inputs(case: Case, device: str | torch.device) -> dict[str, Any]:
    """Keyword arguments of `engram`, made from the case's seed; of a split table also `buffers`, what `peers` points to."""
    params = case.params
    generator = torch.Generator().manual_seed(case.seed)
    tokens, heads, dim = params["tokens"], params.get("heads", 24), params.get("dim", 256)
    rows, start = params.get("rows", 1500), params.get("vocab_start", 0)
    end = start + params.get("vocab_rows", rows)
    codes, scales = _table(params.get("codes", "random"), rows, dim, generator, device)
    ids = _ids(params, tokens, params.get("all_heads", heads), (start, end), generator, device)
    place = {"head_start": params.get("head_start", 0), "vocab_start": start, "vocab_end": end}
    out = _make_out(tokens, heads, dim, params.get("row_gap", 0), device)
    inputs = {"out": out, "ids": ids, **place, "background": params.get("background", False)}
    if "parts" in params:
        return inputs | _parts(codes, scales, params["parts"])
    if params.get("host"):
        codes, scales = _on_host(codes), _on_host(scales)
    weight = _shifted(codes, params["shift"]) if "shift" in params else codes
    return inputs | {
        "weight": weight if params.get("raw") else weight.view(torch.float8_e4m3fn), "scales": scales,
        "peers": None, "peer_rows": 0,
    }  # fmt: skip


def expected(case: Case, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle's whole output buffer, for inputs that no one has written to yet."""
    out = inputs["out"]
    copy = _whole(out).clone(memory_format=torch.contiguous_format)
    view = torch.as_strided(copy, out.shape, (copy.shape[1], out.shape[2], 1))
    reference.engram(**{**_whole_table(inputs), "out": view})
    return {"out": copy}


def run(inputs: Mapping[str, Any], function: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    """Calls the op, or `function` in its place, which gets the whole table, and returns the whole output buffer."""
    arguments = _whole_table(inputs)
    if function is None:
        arguments |= {"weight": inputs["weight"], "scales": inputs["scales"]}
    (function or engram)(**arguments)
    return {"out": _whole(inputs["out"])}


def call_kwargs(inputs: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The op's own arguments: stock's is a method of a module, there is nothing to call."""
    return {name: value for name, value in inputs.items() if name != "buffers"}


def bytes_moved(case: Case) -> int:
    """A row of codes and scales in, one of bf16 out, and the ids."""
    count, dim = case.params["tokens"] * case.params.get("heads", 24), case.params.get("dim", 256)
    return count * (dim + dim // 32 + 2 * dim + 4)


def flops(case: Case) -> int:
    """One product per code."""
    return int(case.params["tokens"]) * int(case.params.get("heads", 24)) * int(case.params.get("dim", 256))


def _table(
    kind: str, rows: int, dim: int, generator: torch.Generator, device: str | torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[rows, dim]` and scales `[rows, dim / 32]`: all pairs in order, random, or what trained tables hold."""
    groups = rows * dim // 32
    if kind == "all":
        group = torch.arange(groups)
        scales = (group // 8 % 256).view(rows, -1)
        codes = (group[:, None] % 8 * 32 + torch.arange(32)).view(rows, dim)
    elif groups > 1 << 24:
        # large: made on the device itself
        seed = int(torch.randint(1 << 30, (1,), generator=generator))
        own = None if str(device) == "meta" else torch.Generator(device).manual_seed(seed)
        codes = torch.randint(0x7F, (rows, dim), generator=own, dtype=torch.uint8, device=device)
        scales = torch.randint(110, 130, (rows, dim // 32), generator=own, dtype=torch.uint8, device=device)
    else:
        codes = torch.randint(256, (rows, dim), generator=generator)
        scales = torch.randint(256, (rows, dim // 32), generator=generator)
        if kind == "usual":
            codes[codes & 0x7F == 0x7F] = 0
            scales = 110 + scales % 20
    return codes.to(device, torch.uint8), scales.to(device, torch.uint8)


def _ids(
    params: Mapping[str, Any], tokens: int, all_heads: int, vocab: tuple[int, int], generator: torch.Generator,
    device: str | torch.device,
) -> torch.Tensor:  # fmt: skip
    """Ids of own rows, some of them -1 or other ranks'; one layer of `layers`."""
    start, end = vocab
    shape = (tokens, params.get("layers", 1), all_heads)
    ids = torch.randint(start, end, shape, generator=generator)
    if params.get("codes") == "all":
        ids = (torch.arange(ids.numel()) % (end - start) + start).view(shape)
    if params.get("last"):
        ids = end - 1 - (ids - start) % 5000
    foreign = torch.rand(shape, generator=generator) < params.get("foreign", 0.0)
    # -1, the row before the first, the row after the last, far away
    choice = torch.tensor([-1, start - 1, end, 2**31 - 1])[torch.randint(4, shape, generator=generator)]
    return torch.where(foreign, choice, ids).to(device, torch.int32)[:, -1]


def _parts(codes: torch.Tensor, scales: torch.Tensor, count: int) -> dict[str, Any]:
    """The table split over `count` ranks, as each has it: rows of codes, then their scales; the last one is not full."""
    rows, dim = codes.shape
    each = -(-rows // count)
    buffers = []
    for first in range(0, each * count, each):
        part = torch.full((each * (dim + dim // 32),), 0xFF, dtype=torch.uint8, device=codes.device)
        some = codes[first : first + each]
        part[: some.numel()] = some.flatten()
        mine = scales[first : first + each]
        part[each * dim : each * dim + mine.numel()] = mine.flatten()
        buffers.append(part)
    pointers = torch.tensor([part.data_ptr() for part in buffers], dtype=torch.int64, device=codes.device)
    weight = buffers[-1][: each * dim].view(each, dim).view(torch.float8_e4m3fn)
    own = buffers[-1][each * dim :].view(each, dim // 32)
    return {"weight": weight, "scales": own, "peers": pointers, "peer_rows": each, "buffers": tuple(buffers)}


def _whole_table(inputs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call_kwargs(inputs, "op")
    if "buffers" in inputs:
        split = inputs["peer_rows"] * inputs["out"].shape[2]
        width = inputs["out"].shape[2]
        arguments["weight"] = torch.cat([part[:split].view(-1, width) for part in inputs["buffers"]])
        arguments["scales"] = torch.cat([part[split:].view(-1, width // 32) for part in inputs["buffers"]])
    return arguments


class _Mapped:
    """Pinned host memory with an address that CUDA code can use."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape), "typestr": "|u1", "data": (pinned.data_ptr(), False), "version": 2,
        }  # fmt: skip


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA view of a copy in pinned host memory, as vLLM makes for offloaded tables."""
    return torch.as_tensor(_Mapped(tensor.cpu().pin_memory()), device=tensor.device)


def _shifted(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    memory = torch.empty(tensor.numel() + shift, dtype=torch.uint8, device=tensor.device)
    memory[shift:] = tensor.flatten()
    return memory[shift:].view(tensor.shape)


def _make_out(tokens: int, heads: int, dim: int, gap: int, device: str | torch.device) -> torch.Tensor:
    stride = heads * dim + gap
    buffer = torch.full((tokens * stride,), SENTINEL, dtype=torch.bfloat16, device=device)
    return torch.as_strided(buffer, (tokens, heads, dim), (stride, dim, 1))


def _whole(out: torch.Tensor) -> torch.Tensor:
    """`out` with its tokens' gaps, `[tokens, stride]`."""
    return torch.as_strided(out, (out.shape[0], out.stride(0)), (out.stride(0), 1))
