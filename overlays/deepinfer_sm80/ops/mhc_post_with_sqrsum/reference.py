"""Oracle of `mhc_post_with_sqrsum`."""

from __future__ import annotations

import torch

from ..mhc import reference


def mhc_post_with_sqrsum(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the op; the sums are float64 before they are rounded."""
    new = reference.post(x, residual, post_layer_mix, comb_res_mix)
    sums = new.double().square().sum((1, 2)).float()
    if out is None:
        return new, sums
    return out[0].copy_(new), out[1].copy_(sums)
