"""The calls that `gpu_live_calls.py` makes, for each replaced function: inputs, the call, and what must come of it.

Inputs and oracles are those of the ops' own workloads. A call returns a row: `as_oracle`, and `as_stock` where stock's
function can be asked too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

# symbol → op and the name of the op's function
SYMBOLS = {
    "dequantize_and_gather_k_cache": ("gather", "gather"),
    "combine_topk_swa_indices": ("combine", "combine"),
    "build_ragged_indices_from_dense": ("ragged", "build_ragged"),
    "rocm_sparse_attn_prefill": ("sparse_prefill", "sparse_prefill"),
    "rocm_sparse_attn_decode": ("sparse_decode", "sparse_decode"),
    "mhc_pre_delayed_tilelang": ("mhc_pre_delayed", "mhc_pre_delayed"),
    "mhc_fused_post_pre_delayed_tilelang": ("mhc_fused_post_pre_delayed", "mhc_fused_post_pre_delayed"),
    "mhc_post_tilelang": ("mhc_post", "mhc_post"),
}
# cases of the gather workloads that stock defines the result of; the others reach where stock reads or writes astray
STOCK_GATHERS = frozenset(
    {"one-row", "odd-length", "page-boundary", "starts-inside-a-page", "swa-after-compressed", "16384-tokens"}
)
# the same for sparse attention: no NaN, no infinite product, nothing that only ours takes
STOCK_ATTENTION = frozenset(
    {"usual", "swa-only", "one-row", "two-rows", "ragged", "holes", "unit-normal-512-rows"}
)
# what tells that stock cannot run on this card, or not with what is installed; any other failure is ours to explain
EXPECTED_STOCK_ERRORS = ("not supported in this architecture",)

Call = Callable[[Callable[..., Any], Any, bool], dict[str, Any]]


def device() -> str:
    """The GPU; without one the kernels must run in Triton's interpreter."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def cases(op: str, caller: Any) -> Iterator[tuple[str, bool, Call]]:
    """Name, whether stock defines the result too, and the call, for the module `caller` that holds the function."""
    if op == "combine":
        yield from _combine_cases(with_out=not caller.__name__.endswith("amd.rocm"))
        return
    workloads = importlib.import_module(f"vllm.deepinfer_sm80.ops.{op}.workloads")
    make = {"gather": _gather_call, "ragged": _ragged_call, "sparse_decode": _decode_call}.get(
        op, _plain_call
    )
    for case in workloads.cases("full" if device() == "cuda" and op == "gather" else "smoke"):
        if device() == "cpu" and case.gpu_only:
            continue
        if op == "gather":
            if not case.gpu_only or case.name in STOCK_GATHERS:
                yield case.name, case.name in STOCK_GATHERS, make(workloads, case, caller)
        elif case.params.get("hidden", 5120) == 5120 and case.params.get("tokens", 1):
            # stock's mHC is the benchmarks' matter: here it would compile for minutes, and for another card's path
            stock = op == "ragged" or case.name in STOCK_ATTENTION
            yield case.name, stock, make(workloads, case, caller)


def row(
    function: Any, counted: Any, same: bool | str, compare: Callable[[Any], bool | str] | bool
) -> dict[str, Any]:
    """A result row; a comparison gives True, False or, in words, what differs."""
    made: dict[str, Any] = {"ours": hasattr(function, "__deepinfer__"), "calls": len(counted.calls)}
    made |= {"as_oracle": same is True, "as_stock": None}
    if isinstance(same, str):
        made["differs"] = same
    made["ok"] = made["ours"] and made["calls"] == 1 and same is True
    if not callable(compare) or not made["ours"]:
        return made
    try:
        as_stock = compare(function.__deepinfer__["stock"])
        made["as_stock"] = as_stock is True
        if isinstance(as_stock, str):
            made["stock_differs"] = as_stock
    except Exception as error:
        made["stock_error"] = f"{type(error).__name__}: {error}"[:1000]
    allowed = any(text in made.get("stock_error", "") for text in EXPECTED_STOCK_ERRORS)
    made["ok"] &= made["as_stock"] is True or allowed
    return made


def _plain_call(workloads: Any, case: Any, caller: Any) -> Call:
    """An op whose oracle does not depend on the release: sparse prefill and mHC (that one without stock)."""

    def through(target: Callable[..., Any], baseline: bool) -> bool | str:
        inputs = workloads.make_inputs(case, device())
        if workloads.OP.startswith("mhc_"):
            inputs["out"] = None
        want = workloads.expected(case, inputs)
        got = workloads.run(inputs, lambda **same: _call_as_vllm_does(workloads, target, same))
        return _judged(workloads, case, got, want)

    def call(function: Callable[..., Any], counted: Any, compare: bool) -> dict[str, Any]:
        same = through(function, False)
        return row(function, counted, same, compare and (lambda stock: through(stock, True)))

    return call


def _call_as_vllm_does(workloads: Any, target: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    known = inspect.signature(target).parameters
    kwargs = workloads.call_kwargs(inputs, "stock")
    return target(**{name: value for name, value in kwargs.items() if name in known})


def _decode_call(workloads: Any, case: Any, caller: Any) -> Call:
    """Sparse decode with what `forward_mqa` does after it: it rotates the rows from the returned number on."""

    def attend(target: Callable[..., Any], baseline: bool) -> tuple[Any, bool | str]:
        inputs = workloads.make_inputs(case, device())
        rotates = "inv_rope_positions" in inspect.signature(target).parameters
        if not rotates:
            # 0.30: `_o_proj` rotates every row later
            inputs = {
                name: value for name, value in inputs.items() if name not in ("positions", "cos_sin_cache")
            }
        want = workloads.expected(case, inputs)
        returned: list[Any] = []

        def decode(**same: Any) -> None:
            if baseline:
                # stock looks at the dense rows' shape also where it does not use them
                same = {**same, "swa_placeholder": None}
            returned.append(_call_decode(workloads, target, same))

        got = workloads.run(inputs, decode)
        positions = inputs.get("positions")
        if positions is not None and not baseline:
            rotated = returned[0] if isinstance(returned[0], int) else 0
            out = inputs["out"][rotated:]
            helper = getattr(caller, "rocm_inverse_rope_rows_", None)
            if len(out) and helper is not None:
                helper(out, positions[rotated:], inputs["cos_sin_cache"], 64)
        return (returned[0], rotates, inputs), _judged(workloads, case, got, want)

    def call(function: Callable[..., Any], counted: Any, compare: bool) -> dict[str, Any]:
        (returned, rotates, inputs), same = attend(function, False)
        should = (len(inputs["q"]) if "positions" in inputs else 0) if rotates else None
        # stock off gfx9 rotates nothing, so only what is not rotated can be compared
        compare = compare and "positions" not in inputs
        made = row(function, counted, same, compare and (lambda stock: attend(stock, True)[1]))
        shown = returned if isinstance(returned, int | None) else type(returned).__name__
        made |= {"returned": shown, "returned_right": shown == should, "rotated": bool(should)}
        made["ok"] &= made["returned_right"]
        return made

    return call


def _call_decode(workloads: Any, target: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    placeholder = "swa_placeholder" in inputs
    inputs.pop("swa_placeholder", None)
    kwargs = workloads.call_kwargs(inputs, "stock")
    if placeholder:
        q = inputs["q"]
        kwargs["swa_indices"] = inputs["swa_indices"].new_empty((q.shape[0], 1, 1))
        if not kwargs["swa_only"]:
            kwargs["topk_indices"] = None
    known = inspect.signature(target).parameters
    return target(**{name: value for name, value in kwargs.items() if name in known})


def _ragged_call(workloads: Any, case: Any, caller: Any) -> Call:
    """The ragged build, by the contract that the binding has taken from stock's own code."""

    def call(function: Callable[..., Any], counted: Any, compare: bool) -> dict[str, Any]:
        inputs = workloads.make_inputs(case, device())
        kwargs = workloads.call_kwargs(inputs, "stock")
        got = workloads.run(kwargs, function)
        compact = counted.calls[0]["compact"] if counted.calls else True
        want = workloads.expected(case, {**inputs, "compact": compact})
        # stock takes int32 rows whose columns are next to each other
        plain = not case.params.get("int64") and case.params.get("column_stride", 1) == 1

        def as_stock(stock: Callable[..., Any]) -> bool:
            flat, indptr = stock(**kwargs)
            count = int(indptr[-1])
            return same_bytes(indptr, got["indptr"]) and same_bytes(flat[:count], got["flat"][:count])

        equal = same_bytes(got["flat"], want["flat"]) and same_bytes(got["indptr"], want["indptr"])
        return {
            **row(function, counted, equal, compare and plain and as_stock),
            "contract": {"compact": compact},
        }

    return call


def _gather_call(workloads: Any, case: Any, caller: Any) -> Call:
    def call(function: Callable[..., Any], counted: Any, compare: bool) -> dict[str, Any]:
        known = inspect.signature(function).parameters

        def through(target: Callable[..., Any]) -> tuple[Any, Any]:
            inputs = workloads.make_inputs(case, device())
            _usual_scales(inputs["k_cache"])
            want = workloads.expected(case, inputs)["out"]
            kept = {name: value for name, value in inputs.items() if name in known}
            target(**kept)
            return workloads.run(inputs, lambda **_: None)["out"], want

        got, want = through(function)
        as_stock = compare and (lambda stock: same_bytes(through(stock)[0], got))
        return row(function, counted, same_bytes(got, want), as_stock)

    return call


def _usual_scales(k_cache: Any) -> None:
    """Moves every scale into what stock's writers make; stock reads 0 and 255 in ways of its own."""
    import torch

    blocks, size, _ = k_cache.shape
    start = k_cache.storage_offset() + size * 576
    scales = torch.as_strided(k_cache, (blocks, size * 8), (k_cache.stride(0), 1), start)
    scales.copy_(scales.clamp(105, 139))


def _combine_cases(with_out: bool) -> Iterator[tuple[str, bool, Call]]:
    for ratio in (0, 1, 2):
        for holes in (False, True):
            name = f"ratio-{ratio}{'-holes' if holes else ''}"
            # the common kernel of 0.30 and 0.31 stores holes as they are: there only rows without are compared
            yield name, not holes, _combine_call(ratio, holes, with_out)


def _combine_call(ratio: int, holes: bool, with_out: bool) -> Call:
    def call(function: Callable[..., Any], counted: Any, compare: bool) -> dict[str, Any]:
        import torch

        reference = importlib.import_module("vllm.deepinfer_sm80.ops.combine.reference")
        args, num_tokens = _combine_args(ratio, holes)

        def through(target: Callable[..., Any]) -> Any:
            if not with_out:
                return target(*args)
            out = (torch.full((num_tokens, 640), -1, dtype=torch.int32, device=device()),
                   torch.full((num_tokens,), -7, dtype=torch.int32, device=device()))  # fmt: skip
            return target(*args, out=out)

        got = through(function)
        flags = (
            {name: counted.calls[0][name] for name in ("replay_clamp", "width_cap")} if counted.calls else {}
        )
        want = reference.combine(*args, **(flags or {"replay_clamp": True, "width_cap": False}))
        width = want[0].shape[1]
        same = same_bytes(got[0][:, :width], want[0]) and same_bytes(got[1], want[1])

        def as_stock(stock: Callable[..., Any]) -> bool:
            indices, lens = through(stock)
            return same_bytes(indices[:, :width], got[0][:, :width]) and same_bytes(lens, got[1])

        return {**row(function, counted, same, compare and as_stock), "contract": flags}

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
    tensors = [one.to(device(), torch.int32) for one in (indices, starts, *vectors)]
    return (*tensors, 128, ratio, topk, longest + 1024, longest), sum(query_lens)


def _judged(workloads: Any, case: Any, got: Any, want: Any) -> bool | str:
    """By the op's own tolerances, stock too."""
    from deepinfer_cli.validate import compare

    verdict = compare.compare_outputs(got, want, compare.tolerances_of(workloads, case))
    return True if verdict.ok else f"{verdict.reason} {verdict.first_bad}"


def same_bytes(got: Any, want: Any) -> bool:
    """Equal bytes; NaN at equal places."""
    import torch

    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    want = want.to(got.device)
    if not got.is_floating_point():
        return bool(torch.equal(got, want))
    bits = got.contiguous().view(torch.int16) == want.contiguous().view(torch.int16)
    return bool((bits | (got.isnan() & want.isnan())).all())
