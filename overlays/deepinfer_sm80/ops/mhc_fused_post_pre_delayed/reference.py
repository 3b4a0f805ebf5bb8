"""Oracle of `mhc_fused_post_pre_delayed`."""

from __future__ import annotations

from typing import Any

import torch

from ..mhc import reference


def mhc_fused_post_pre_delayed(
    *args: Any, out: tuple[torch.Tensor, ...] | None = None, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """See the op; coefficients are float64 before they are rounded."""
    new, post, comb, layer_input, next_pre, aux = reference.fused_post_pre_delayed(*args, **kwargs)
    results = new, post.float(), comb.float(), layer_input, next_pre.float(), aux
    return results if out is None else tuple(to.copy_(of) for to, of in zip(out, results, strict=True))
