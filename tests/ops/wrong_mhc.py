"""Deliberately wrong implementations of the mHC ops, made from their oracles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from deepinfer_sm80.ops.mhc import reference
from deepinfer_sm80.ops.mhc_fused_post_pre_delayed.reference import mhc_fused_post_pre_delayed
from deepinfer_sm80.ops.mhc_post.reference import mhc_post
from deepinfer_sm80.ops.mhc_post_with_sqrsum.reference import mhc_post_with_sqrsum
from deepinfer_sm80.ops.mhc_pre_delayed.reference import mhc_pre_delayed

Op = Callable[..., Any]


def _changed(op: Op, **changes: Callable[[dict[str, Any]], Any]) -> Op:
    """`op` with some arguments replaced by what `changes` makes of all of them."""

    def wrong(**kwargs: Any) -> Any:
        return op(**{**kwargs, **{name: change(kwargs) for name, change in changes.items()}})

    return wrong


def _patched(op: Op, name: str, wrong_part: Op) -> Op:
    """`op` with one function of the shared oracle replaced while it runs."""

    def wrong(**kwargs: Any) -> Any:
        right = getattr(reference, name)
        setattr(reference, name, wrong_part)
        try:
            return op(**kwargs)
        finally:
            setattr(reference, name, right)

    return wrong


def _other_output(op: Op, index: int, change: Callable[[dict[str, Any], torch.Tensor], torch.Tensor]) -> Op:
    """`op` with one output replaced, in its buffer too where there is one."""

    def wrong(**kwargs: Any) -> Any:
        results = list(op(**kwargs))
        results[index].copy_(change(kwargs, results[index]))
        return tuple(results)

    return wrong


def _transposed(kwargs: dict[str, Any]) -> torch.Tensor:
    return kwargs["comb_res_mix"].transpose(1, 2).contiguous()


def _next_token(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda kwargs: kwargs[name] if kwargs[name] is None else kwargs[name].roll(1, 0)


def _post_in_float64(x, residual, post_layer_mix, comb_res_mix):
    total = post_layer_mix.reshape(-1, 4, 1).double() * x[:, None].double()
    total = total + torch.einsum("tij,tih->tjh", comb_res_mix.double(), residual.double())
    return total.float().bfloat16()


def _post_output_last(x, residual, post_layer_mix, comb_res_mix):
    total = torch.zeros_like(residual, dtype=torch.float32)
    for i in range(4):
        total = reference.fma(comb_res_mix[:, i, :, None], residual[:, i, None].float(), total)
    return reference.fma(post_layer_mix.reshape(-1, 4, 1), x[:, None].float(), total).bfloat16()


def _post_without_output(x, residual, post_layer_mix, comb_res_mix):
    return _RIGHT_POST(torch.zeros_like(x), residual, post_layer_mix, comb_res_mix)


def _other_mixing(op: Op, **numbers: float) -> Op:
    return _changed(op, mixing=lambda kwargs: replace(kwargs["mixing"], **numbers))


def _fewer_iterations(op: Op) -> Op:
    def fewer(kwargs: dict[str, Any]) -> Any:
        return replace(kwargs["mixing"], iterations=max(1, kwargs["mixing"].iterations - 1))

    return _changed(op, mixing=fewer)


def _rows_first(mixes, sqrsum, numel, scale, base, mixing):
    pre, after, _ = _RIGHT_COEFFICIENTS(mixes, sqrsum, numel, scale, base, mixing)
    swapped = mixes.clone()
    swapped[:, 8:] = mixes[:, 8:].reshape(-1, 4, 4).transpose(1, 2).flatten(1)
    base = torch.cat([base[:8], base[8:].reshape(4, 4).T.flatten()])
    comb = _RIGHT_COEFFICIENTS(swapped, sqrsum, numel, scale, base, mixing)[2]
    return pre, after, comb.transpose(1, 2)


def _not_normalised(mixes, sqrsum, numel, *rest):
    return _RIGHT_COEFFICIENTS(mixes, torch.full_like(sqrsum, numel), numel, *rest)


def _mean_for_sum(mixes, sqrsum, numel, *rest):
    return _RIGHT_COEFFICIENTS(mixes, sqrsum / numel, numel, *rest)


def _half_the_columns(x, fn):
    half = x.shape[1] // 2
    return _RIGHT_PROJECT(x[:, :half], fn[:, :half])


def _fn_as_bf16(x, fn):
    return _RIGHT_PROJECT(x, fn.bfloat16().float())


def _collapse_in_bf16(residual, pre_mix):
    if pre_mix is None:
        return residual[:, 0]
    return (pre_mix.bfloat16()[:, :, None] * residual).sum(1)


def _collapse_unweighted(residual, pre_mix):
    return residual.float().sum(1).bfloat16()


def _last_stream(residual, pre_mix):
    return residual[:, 3] if pre_mix is None else _RIGHT_COLLAPSE(residual, pre_mix)


def _collapsed_too_late(op: Op) -> Op:
    """Uses this step's pre-mix, which belongs to the next."""

    def wrong(**kwargs: Any) -> Any:
        results = op(**{**kwargs, "out": None})
        # next_pre_mix is the last output of one op, the last but one of the other
        new = next(tensor for tensor in reversed(results) if tensor.dtype == torch.float32)
        return op(**{**kwargs, "pre_mix": new})

    return wrong


def _weight_ignored(collapsed, weight, eps):
    return _RIGHT_NORMALIZE(collapsed, None if weight is None else torch.ones_like(weight), eps)


def _normalised_by_sum(collapsed, weight, eps):
    if weight is None:
        return collapsed
    rows = collapsed.double()
    return (rows * torch.rsqrt(rows.square().sum(1, keepdim=True) + eps) * weight).bfloat16()


def _weighted_mean(kwargs: dict[str, Any], aux: torch.Tensor) -> torch.Tensor:
    return aux if kwargs["pre_mix"] is None else aux * 0.5


def _sum_of_unrounded(kwargs: dict[str, Any], sums: torch.Tensor) -> torch.Tensor:
    total = kwargs["post_layer_mix"].double() * kwargs["x"][:, None].double()
    total = total + torch.einsum("tij,tih->tjh", kwargs["comb_res_mix"].double(), kwargs["residual"].double())
    return total.square().sum((1, 2)).float()


def _projects_the_residual(kwargs: dict[str, Any]) -> Any:
    """The first layer's embedding is not what is projected."""
    x = kwargs.get("x")
    return None if x is None else kwargs["residual"][:, 1].contiguous()


_RIGHT_POST = reference.post
_RIGHT_PROJECT = reference.project
_RIGHT_COEFFICIENTS = reference.coefficients
_RIGHT_COLLAPSE = reference.collapse
_RIGHT_NORMALIZE = reference.normalize


def _wrong_post(op: Op) -> dict[str, Op]:
    return {
        "transposed-comb": _changed(op, comb_res_mix=_transposed),
        "comb-of-next-token": _changed(op, comb_res_mix=_next_token("comb_res_mix")),
        "off-by-one-row": _changed(op, x=_next_token("x")),
        "missing-output": _patched(op, "post", _post_without_output),
        "output-added-last": _patched(op, "post", _post_output_last),
        "not-in-float32": _patched(op, "post", _post_in_float64),
    }


def _wrong_pre(op: Op) -> dict[str, Op]:
    return {
        "one-iteration-less": _fewer_iterations(op),
        "rows-before-columns": _patched(op, "coefficients", _rows_first),
        "missing-norm-of-the-row": _patched(op, "coefficients", _not_normalised),
        "mean-for-sum": _patched(op, "coefficients", _mean_for_sum),
        "missing-rms-eps": _other_mixing(op, rms_eps=0.0),
        "missing-pre-eps": _other_mixing(op, pre_eps=0.0),
        "missing-sinkhorn-eps": _other_mixing(op, sinkhorn_eps=0.0),
        "missing-post-factor": _other_mixing(op, post_factor=1.0),
        "missing-base": _changed(op, hc_base=lambda kwargs: torch.zeros_like(kwargs["hc_base"])),
        "scales-rotated": _changed(op, hc_scale=lambda kwargs: kwargs["hc_scale"].roll(1)),
        "half-the-columns": _patched(op, "project", _half_the_columns),
        "pre-mix-of-next-token": _changed(op, pre_mix=_next_token("pre_mix")),
        "collapse-with-the-new-pre-mix": _collapsed_too_late(op),
        "collapse-in-bf16": _patched(op, "collapse", _collapse_in_bf16),
        "collapse-unweighted": _patched(op, "collapse", _collapse_unweighted),
        "last-stream-for-first": _patched(op, "collapse", _last_stream),
        "missing-norm": _changed(op, norm_weight=lambda kwargs: None),
        "missing-norm-weight": _patched(op, "normalize", _weight_ignored),
        "missing-norm-eps": _changed(op, norm_eps=lambda kwargs: 0.0),
        "norm-by-sum": _patched(op, "normalize", _normalised_by_sum),
    }


WRONG: dict[str, dict[str, Op]] = {
    "mhc_post": _wrong_post(mhc_post),
    "mhc_post_with_sqrsum": {
        **_wrong_post(mhc_post_with_sqrsum),
        "sum-is-a-mean": _other_output(mhc_post_with_sqrsum, 1, lambda kwargs, sums: sums / 20480),
        "sum-of-unrounded": _other_output(mhc_post_with_sqrsum, 1, _sum_of_unrounded),
        "sum-of-the-old": _other_output(
            mhc_post_with_sqrsum, 1, lambda kwargs, sums: kwargs["residual"].float().square().sum((1, 2))
        ),
    },
    "mhc_pre_delayed": {
        **_wrong_pre(mhc_pre_delayed),
        "fn-in-one-bf16": _patched(mhc_pre_delayed, "project", _fn_as_bf16),
        "residual-for-embedding": _changed(mhc_pre_delayed, x=_projects_the_residual),
    },
    "mhc_fused_post_pre_delayed": {
        **_wrong_post(mhc_fused_post_pre_delayed),
        **_wrong_pre(mhc_fused_post_pre_delayed),
        "aux-weighted": _other_output(mhc_fused_post_pre_delayed, 5, _weighted_mean),
    },
}
