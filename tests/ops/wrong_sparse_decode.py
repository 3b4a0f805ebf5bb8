"""Deliberately wrong sparse decodes, made from the oracle; the harness must see each fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepinfer_sm80.ops.gather import reference as records
from deepinfer_sm80.ops.sparse_decode import reference

OP = "sparse_decode"


def _shift_slots(slots: torch.Tensor, by: int) -> torch.Tensor:
    return torch.where(slots > 0, slots + by, slots)


def _off_by_one_row(**kwargs: Any) -> None:
    names = [name for name in ("swa_indices", "extra_indices") if name in kwargs]
    reference.sparse_decode(**kwargs | {name: _shift_slots(kwargs[name], -1) for name in names})


def _list_starts_late(**kwargs: Any) -> None:
    late = kwargs["swa_indptr"].clone()
    late[:-1] = torch.minimum(late[:-1] + 1, late[1:])
    reference.sparse_decode(**kwargs | {"swa_indptr": late})


def _scale_twice(**kwargs: Any) -> None:
    reference.sparse_decode(**kwargs | {"scale": kwargs["scale"] ** 2})


def _record_scale_twice(**kwargs: Any) -> None:
    table = records.ue8m0.reference_values
    records.ue8m0.reference_values = lambda: [min(value * value, 2.0**200) for value in table()]
    try:
        reference.sparse_decode(**kwargs)
    finally:
        records.ue8m0.reference_values = table


def _missing_mask(**kwargs: Any) -> None:
    for name in ("swa", "extra"):
        if f"{name}_indices" in kwargs:
            cache = kwargs[f"{name}_cache"]
            last = cache.shape[0] * cache.shape[1] - 1
            kwargs[f"{name}_indices"] = kwargs[f"{name}_indices"].clamp(0, last)
    reference.sparse_decode(**kwargs)


def _extra_ignored(**kwargs: Any) -> None:
    reference.sparse_decode(
        **{name: value for name, value in kwargs.items() if not name.startswith("extra_")}
    )


def _extra_block_size_of_swa(**kwargs: Any) -> None:
    if "extra_cache" in kwargs:
        cache, block = kwargs["extra_cache"], kwargs["swa_cache"].shape[1]
        shape = (max(1, cache.shape[0] * cache.shape[1] // block - 8), block, 584)
        kwargs["extra_cache"] = cache.as_strided(shape, cache.stride())
    reference.sparse_decode(**kwargs)


def _missing_sink(**kwargs: Any) -> None:
    reference.sparse_decode(**kwargs | {"sink": None})


def _sink_in_the_numerator(**kwargs: Any) -> None:
    without = reference.attend(
        **{name: value for name, value in kwargs.items() if name != "out"} | {"sink": None}
    )[0]
    right = reference.attend(**{name: value for name, value in kwargs.items() if name != "out"})[0]
    share = torch.where(without == 0, 0.0, 1 - right / without)
    kwargs["out"].copy_((right + share).float())


def _unrotated(**kwargs: Any) -> None:
    reference.sparse_decode(**kwargs | {"positions": None})


def _turned_again(sign: int) -> Callable[..., None]:
    def wrong(**kwargs: Any) -> None:
        exact = reference.attend(**{name: value for name, value in kwargs.items() if name != "out"})[0]
        if kwargs.get("positions") is not None:
            table = kwargs["cos_sin_cache"][kwargs["positions"]].double()[:, None]
            for _ in range(2 if sign > 0 else 1):
                reference.rotate(exact, table[..., :32], sign * table[..., 32:])
        kwargs["out"].copy_(exact.float())

    return wrong


def _nan_not_scrubbed(**kwargs: Any) -> None:
    kept = torch.where
    reference.torch.where = lambda condition, yes, no: no
    try:
        reference.sparse_decode(**kwargs)
    finally:
        reference.torch.where = kept


def _merged_without_maxima(**kwargs: Any) -> None:
    """Two splits per cache, merged by their sums alone."""
    _merge(kwargs, torch.zeros_like, sinks=1)


def _sink_in_every_split(**kwargs: Any) -> None:
    _merge(kwargs, lambda largest: largest, sinks=2)


def _merge(kwargs: dict[str, Any], weight: Callable[[torch.Tensor], torch.Tensor], sinks: int) -> None:
    q, out, scale, sink = (kwargs[name] for name in ("q", "out", "scale", "sink"))
    exact = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for token in range(len(q)):
        kv = torch.cat(
            [
                reference.rows(
                    kwargs[f"{name}_cache"], kwargs[f"{name}_indices"][ends[token] : ends[token + 1]]
                )
                for name in ("swa", "extra")
                if f"{name}_cache" in kwargs
                for ends in [kwargs[f"{name}_indptr"].tolist()]
            ]
        )
        total = torch.zeros(q.shape[1], 1, dtype=torch.float64, device=q.device)
        for half in kv.tensor_split(2):
            if len(half):
                scores = q[token].double() @ half.T * scale
                largest = scores.amax(1, keepdim=True)
                factor = weight(largest).exp()
                exact[token] += factor * ((scores - largest).exp() @ half)
                total += factor * (scores - largest).exp().sum(1, keepdim=True)
        if sink is not None and len(kv):
            total += sinks * sink[: q.shape[1], None].double().exp()
        if len(kv):
            exact[token] /= total
    if kwargs.get("positions") is not None:
        table = kwargs["cos_sin_cache"][kwargs["positions"]].double()[:, None]
        reference.rotate(exact, table[..., :32], -table[..., 32:])
    out.copy_(exact.float())


def _writes_a_spare_head(**kwargs: Any) -> None:
    reference.sparse_decode(**kwargs)
    out = kwargs["out"]
    if len(out) and out.stride(0) > out.shape[1] * out.stride(1):
        torch.as_strided(out, (512,), (1,), out.shape[1] * out.stride(1) + out.storage_offset()).zero_()


WRONG: dict[str, Callable[..., Any]] = {
    "off-by-one-row": _off_by_one_row,
    "list-starts-late": _list_starts_late,
    "scale-twice": _scale_twice,
    "record-scale-twice": _record_scale_twice,
    "missing-mask": _missing_mask,
    "extra-ignored": _extra_ignored,
    "extra-block-size-of-swa": _extra_block_size_of_swa,
    "missing-sink": _missing_sink,
    "sink-in-the-numerator": _sink_in_the_numerator,
    "sink-in-every-split": _sink_in_every_split,
    "merged-without-maxima": _merged_without_maxima,
    "unrotated": _unrotated,
    "rotated-twice": _turned_again(-1),
    "rotated-forward": _turned_again(1),
    "nan-not-scrubbed": _nan_not_scrubbed,
    "writes-a-spare-head": _writes_a_spare_head,
}
