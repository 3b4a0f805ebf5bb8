"""Call the bound functions of an imported vLLM through its own modules; a child of `gpu_live_check.py`.

    python scripts/gpu_live_calls.py ANSWER LAYOUT compare-stock|ignore-stock CALLER...

Writes to ANSWER a JSON list with an entry per caller, symbol and case: whether the global is ours, how often our op
was called, and whether the result equals the oracle's and, where stock defines it, stock's.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SYMBOLS = {"dequantize_and_gather_k_cache": "gather", "combine_topk_swa_indices": "combine"}
# cases of the gather workloads that stock defines the result of; the others reach where stock reads or writes astray
STOCK_GATHERS = frozenset(
    {"one-row", "odd-length", "page-boundary", "starts-inside-a-page", "swa-after-compressed", "16384-tokens"}
)


def main(arguments: Sequence[str]) -> None:
    """Run every call in this process and write the answer."""
    answer, layout, stock, *callers = arguments
    Path(answer).write_text(json.dumps(_calls(layout, callers, stock == "compare-stock")))


def _calls(layout: str, callers: list[str], compare_stock: bool) -> list[dict[str, Any]]:
    """Each case through each caller's own global, in this process."""
    import torch

    importlib.import_module(f"vllm.models.{layout}")
    results = []
    for caller in callers:
        module = importlib.import_module(f"vllm.models.{layout}.{caller}")
        for symbol, op in SYMBOLS.items():
            function = getattr(module, symbol)
            counted = _Counter(op)
            for name, comparable, call in _cases(op, caller):
                counted.calls.clear()
                try:
                    row = call(function, counted, compare_stock and comparable)
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                except Exception as error:
                    row = {"ok": False, "error": f"{type(error).__name__}: {error}"[:1000]}
                results.append({"holder": module.__name__, "symbol": symbol, "case": name, **row})
    return results


def _device() -> str:
    """The GPU; without one the kernels must run in Triton's interpreter."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class _Counter:
    """Takes the op's place and passes every call on, so that a call that reached it is seen."""

    def __init__(self, op: str) -> None:
        module = importlib.import_module(f"vllm.deepinfer_sm80.ops.{op}")
        inner = getattr(module, op)
        inner = getattr(inner, "passes_on", inner)
        self.calls: list[dict[str, Any]] = []

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(kwargs)
            return inner(*args, **kwargs)

        vars(counting)["passes_on"] = inner
        setattr(module, op, counting)


Call = Callable[[Callable[..., Any], _Counter, bool], dict[str, Any]]


def _cases(op: str, caller: str) -> Iterator[tuple[str, bool, Call]]:
    """Name, whether stock defines the result too, and the call."""
    if op == "gather":
        workloads = importlib.import_module("vllm.deepinfer_sm80.ops.gather.workloads")
        for case in workloads.cases("full" if _device() == "cuda" else "smoke"):
            if not case.gpu_only or case.name in STOCK_GATHERS:
                yield case.name, case.name in STOCK_GATHERS, _gather_call(workloads, case)
        return
    for ratio in (0, 1, 2):
        for holes in (False, True):
            name = f"ratio-{ratio}{'-holes' if holes else ''}"
            # the common kernel of 0.30 and 0.31 stores holes as they are: there only rows without are compared
            yield name, not holes, _combine_call(ratio, holes, with_out=caller != "amd.rocm")


def _gather_call(workloads: Any, case: Any) -> Call:
    def call(function: Callable[..., Any], counted: _Counter, compare: bool) -> dict[str, Any]:
        known = inspect.signature(function).parameters

        def through(target: Callable[..., Any]) -> tuple[Any, Any]:
            inputs = workloads.make_inputs(case, _device())
            _usual_scales(inputs["k_cache"])
            want = workloads.expected(case, inputs)["out"]
            kept = {name: value for name, value in inputs.items() if name in known}
            target(**kept)
            return workloads.run(inputs, lambda **_: None)["out"], want

        got, want = through(function)
        return _row(
            function, counted, _same(got, want), compare and (lambda stock: _same(through(stock)[0], got))
        )

    return call


def _usual_scales(k_cache: Any) -> None:
    """Moves every scale into what stock's writers make; stock reads 0 and 255 in ways of its own."""
    import torch

    blocks, size, _ = k_cache.shape
    start = k_cache.storage_offset() + size * 576
    scales = torch.as_strided(k_cache, (blocks, size * 8), (k_cache.stride(0), 1), start)
    scales.copy_(scales.clamp(105, 139))


def _combine_call(ratio: int, holes: bool, with_out: bool) -> Call:
    def call(function: Callable[..., Any], counted: _Counter, compare: bool) -> dict[str, Any]:
        import torch

        reference = importlib.import_module("vllm.deepinfer_sm80.ops.combine.reference")
        args, num_tokens = _combine_args(ratio, holes)

        def through(target: Callable[..., Any]) -> Any:
            if not with_out:
                return target(*args)
            out = (torch.full((num_tokens, 640), -1, dtype=torch.int32, device=_device()),
                   torch.full((num_tokens,), -7, dtype=torch.int32, device=_device()))  # fmt: skip
            return target(*args, out=out)

        got = through(function)
        flags = (
            {name: counted.calls[0][name] for name in ("replay_clamp", "width_cap")} if counted.calls else {}
        )
        want = reference.combine(*args, **(flags or {"replay_clamp": True, "width_cap": False}))
        width = want[0].shape[1]
        same = _same(got[0][:, :width], want[0]) and _same(got[1], want[1])

        def as_stock(stock: Callable[..., Any]) -> bool:
            indices, lens = through(stock)
            return _same(indices[:, :width], got[0][:, :width]) and _same(lens, got[1])

        return {**_row(function, counted, same, compare and as_stock), "contract": flags}

    return call


def _combine_args(ratio: int, holes: bool) -> tuple[tuple[Any, ...], int]:
    """Three requests in the middle of a batch, one of them a continuation; Top-K 512, window 128."""
    import torch

    generator = torch.Generator().manual_seed(1000 + 10 * ratio + holes)
    query_lens, seq_lens = [200, 1, 700], [200, 3000, 2500]
    topk, longest = (512, max(seq_lens) // ratio) if ratio else (0, 0)
    indices = torch.randint(0, max(longest, 1), (sum(query_lens), 512), generator=generator)
    if holes:
        indices[torch.rand(indices.shape, generator=generator) < 0.1] = -1
    starts = torch.tensor([7, *query_lens]).cumsum(0)
    gather_lens = [min(seq, query + 127) for query, seq in zip(query_lens, seq_lens, strict=True)]
    vectors = (torch.tensor(one) for one in (seq_lens, gather_lens))
    tensors = [one.to(_device(), torch.int32) for one in (indices, starts, *vectors)]
    return (*tensors, 128, ratio, topk, longest + 1024, longest), sum(query_lens)


def _row(
    function: Any, counted: _Counter, same: bool, compare: Callable[[Any], bool] | bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"ours": hasattr(function, "__deepinfer__"), "calls": len(counted.calls)}
    row |= {"as_oracle": same, "as_stock": None}
    row["ok"] = row["ours"] and row["calls"] == 1 and same
    if not callable(compare) or not row["ours"]:
        return row
    try:
        row["as_stock"] = compare(function.__deepinfer__["stock"])
    except Exception as error:
        row["stock_error"] = f"{type(error).__name__}: {error}"[:1000]
    # stock's gather cannot be compiled for capability 8.0 and 8.6; any other failure is ours to explain
    row["ok"] &= row["as_stock"] is True or "not supported in this architecture" in row.get("stock_error", "")
    return row


def _same(got: Any, want: Any) -> bool:
    """Equal bytes; NaN at equal places."""
    import torch

    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    want = want.to(got.device)
    if not got.is_floating_point():
        return bool(torch.equal(got, want))
    bits = got.contiguous().view(torch.int16) == want.contiguous().view(torch.int16)
    return bool((bits | (got.isnan() & want.isnan())).all())


if __name__ == "__main__":
    main(sys.argv[1:])
