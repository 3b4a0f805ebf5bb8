"""The workloads' writer of 584-byte records; shares nothing with the readers, and quantises through PyTorch's own cast."""

from __future__ import annotations

import torch

# fills pads, unused slots and what lies between pages: NaN would be scrubbed, but as a bf16 this is 5e33
POISON = 0x77
NAN_CODE = 0x7F


class Cache:
    """Records for the slots `used` of a cache of `blocks` pages with `block_size` records each.

    Attributes:
        values: float32 `[n, 512]`, about what the records hold.
        codes, scales, tails: the records: uint8 `[n, 448]` and `[n, 7]`, bfloat16 `[n, 64]`.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        used: torch.Tensor,
        content: torch.Tensor | tuple[torch.Tensor, ...],
    ) -> None:
        self.blocks, self.block_size, self.used = blocks, block_size, used
        if isinstance(content, torch.Tensor):
            self.values = content
            content = quantise(content)
        else:
            self.values = torch.zeros(len(used), 512)
        self.codes, self.scales = (part.to(torch.uint8) for part in content[:2])
        self.tails = content[2]

    def poison_with(self, share: float, generator: torch.Generator) -> None:
        """Makes a share of the codes and of the tail's values NaN, with either sign, and of the scales 255."""
        if share == 0.0:
            return

        def hit(like: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return torch.rand(like.shape, generator=generator) < factor * share

        self.codes = torch.where(hit(self.codes), self.codes | NAN_CODE, self.codes)
        self.scales = torch.where(hit(self.scales, 0.5), 255, self.scales)
        self.tails = torch.where(hit(self.tails), float("nan"), self.tails)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Records of float32 `[n, 512]` as vLLM's writers make them: the smallest power of two that keeps a group within 448."""
    groups = values[:, :448].view(-1, 7, 64)
    largest = groups.abs().amax(2).clamp(min=1e-4)
    exponent = torch.ceil(torch.log2(largest / 448.0))
    codes = (groups / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.reshape(-1, 448), exponent + 127, values[:, 448:].bfloat16()


def write_cache(cache: Cache, gap: int, shift: int, device: str | torch.device) -> torch.Tensor:
    """The cache as uint8 `[blocks, block_size, 584]`, `gap` bytes between pages and `shift` before the first."""
    size = cache.block_size
    stride = -(-size * 584 // 576) * 576 + gap
    memory = torch.full((shift + cache.blocks * stride,), POISON, dtype=torch.uint8, device=device)
    data = torch.as_strided(memory, (cache.blocks, size, 576), (stride, 576, 1), shift)
    scales = torch.as_strided(memory, (cache.blocks, size, 8), (stride, 8, 1), shift + size * 576)
    page, slot = (part.to(device) for part in (cache.used // size, cache.used % size))
    tails = cache.tails.contiguous().view(torch.uint8).to(device)
    data[page, slot] = torch.cat([cache.codes.to(device), tails], 1)
    padded = torch.nn.functional.pad(cache.scales, (0, 1))
    scales[page, slot] = padded.to(device)
    return torch.as_strided(memory, (cache.blocks, size, 584), (stride, 584, 1), shift)
