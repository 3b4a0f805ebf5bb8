"""The oracle's parts, in plain PyTorch and by other means than the kernels: exact arithmetic, rounded where stock rounds."""

from __future__ import annotations

import math

import torch

from ...numerics import e4m3

# e4m3 values of the codes 0 to 0x7e, and the midpoints between neighbours
_VALUES = torch.tensor(e4m3.reference_values()[:0x7F], dtype=torch.float64)
_MIDDLES = (_VALUES[1:] + _VALUES[:-1]) / 2


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32 tensors in one rounding."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # what the sum in float64 lost: with an odd last bit in its place, rounding to float32 cannot go the wrong way
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    even = total.view(torch.int64) & 1 == 0
    towards = torch.where(lost > 0, math.inf, -math.inf).double()
    sticky = torch.where((lost != 0) & even, torch.nextafter(total, towards), total)
    return torch.where(lost.isnan(), total, sticky).float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """GPT-J rotation of float32 `[..., 2 n]` by cos and sin `[..., n]`: element 2 i and 2 i + 1 are a pair."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = [fused(even, cos, -(odd * sin)), fused(odd, cos, even * sin)]
    return torch.stack(turned, dim=-1).flatten(-2)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """float64 2^exponents for integers from -1022 to 1023, exact; `torch.pow` on a GPU is not."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def scale_exponents(x: torch.Tensor) -> torch.Tensor:
    """int64 exponent of the scale of each last dim of bf16 `x`: ceil(log2(max(amax, 1e-4) / 448)); 128 if amax is infinite."""
    amax = torch.where(x.isnan(), 0, x).abs().amax(dim=-1).double().clamp(min=1e-4)
    mantissa, exponent = torch.frexp(amax / 448)
    # amax has eight bits, so the quotient is 0.5 exactly or nowhere near it
    exponents = exponent.long() - (mantissa == 0.5).long()
    return torch.where(amax.isinf(), 128, exponents)


def encode(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """uint8 codes of bf16 `x` divided by 2^exponents (one for each last dim); NaN and infinities become 0x7f."""
    scaled = x.double() * power_of_two(-exponents)[..., None]
    scaled = torch.where(x.isfinite(), scaled, 0)
    size = torch.where((exponents == 128)[..., None], torch.zeros_like(scaled), scaled).abs()
    middles = _MIDDLES.to(x.device)
    # the codes are the indices of their values; a tie lies at a midpoint and goes to the even one
    code = torch.bucketize(size, middles)
    tie = (code < 0x7E) & (size == middles[code.clamp(max=0x7D)]) & (code & 1 == 1)
    code = code + tie.long()
    code = code | torch.where(x.float().signbit(), 0x80, 0)
    return torch.where(x.isfinite(), code, 0x7F).to(torch.uint8)


def groups_that_end(
    positions: torch.Tensor, slots: torch.Tensor, compress_ratio: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the tokens that write a record, and the position that each record is rotated to."""
    positions = positions[: slots.shape[0]]
    writes = (slots >= 0) & ((positions + 1) % compress_ratio == 0)
    tokens = writes.nonzero()[:, 0]
    return tokens, positions[tokens] // compress_ratio * compress_ratio


def pool_of(cache: torch.Tensor) -> torch.Tensor:
    """Every byte from the cache's first page on, also those between and behind its pages."""
    size = cache.untyped_storage().nbytes() - cache.storage_offset()
    return torch.as_strided(cache, (size,), (1,))
