"""How a projected row becomes coefficients: their numbers, and the numbers that shape them."""

from __future__ import annotations

from dataclasses import dataclass

STREAMS = 4
COMB = STREAMS * STREAMS
# of a token, in the order of the projection: a pre-mix and a post-mix of each stream, then the residual mix
MIXES = 2 * STREAMS + COMB


@dataclass(frozen=True)
class Mixing:
    """The five numbers of the contract, those of a model's configuration.

    Attributes:
        rms_eps: added to the mean square of the projected row.
        pre_eps: added to each pre-mix.
        sinkhorn_eps: added to the softmax of the residual mix and to each sum that it is divided by.
        post_factor: multiplies each post-mix.
        iterations: normalisations of the residual mix, at least 1; the first is by columns alone.
    """

    rms_eps: float
    pre_eps: float
    sinkhorn_eps: float
    post_factor: float
    iterations: int
