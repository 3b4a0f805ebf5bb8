"""Gathers and dequantizes 584-byte paged KV records into bf16 rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RECORD_BYTES = 584
HEAD_DIM = 512


def gather(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    max_gather_len: int | None = None,
) -> None:
    """Writes the last `gather_lens[r]` tokens of each request r into `out[r, offset:]`, oldest first.

    A page is `block_size` data rows of 576 bytes (448 e4m3 codes, then 64 bf16) followed by `block_size` scale rows of
    8 bytes (7 UE8M0 codes for 64 dims each, then a pad byte). A value is `e4m3 * 2^(scale - 127)`, rounded once to bf16
    (nearest even, subnormals kept); the bf16 tail is copied bit for bit.

    Args:
        out: bfloat16 `[>= num_reqs, rows, 512]`, last dim contiguous, any other strides. Rows outside
            `[offset, offset + gather_lens[r])` are left as they are.
        k_cache: uint8 `[num_blocks, block_size, 584]`; a page starts every `stride(0)` bytes, which may be any number.
        seq_lens: int32 `[num_reqs]`, in records of this cache.
        gather_lens: int32 `[num_reqs]`; None gathers every record. Rows that would lie before the first record, or past
            the end of `out`, are not written.
        block_table: int32 `[>= num_reqs, pages]`, any row stride; entries that are read must be valid page numbers.
        block_size: records per page.
        offset: first row of `out` to write.
        max_gather_len: longest gather, if the host knows it. Only sizes the grid: a wrong hint costs time, not rows.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a stride, `block_size` or `offset` does not fit.

    Notes:
        Where stock vLLM 0.30-0.33 gives another result for a code:
        scale 0 (2^-127): stock's Triton kernel flushes the scale to zero in `exp2`, its CuTeDSL kernel reads it as a
        bf16 zero: products are 0 there and `code * 2^-127` here. Scale 255: infinity in both (products are infinite,
        NaN for a zero code), NaN here, as the format says. No stock writer makes scales below 105 or, where it removes
        NaN from the cache, 255.
    """
    import torch

    from .. import check
    from .triton import launch

    num_reqs = seq_lens.shape[0]
    check.tensor("out", out, "bfloat16", (None, None, HEAD_DIM), fewest=num_reqs)
    check.tensor("k_cache", k_cache, "uint8", (None, None, RECORD_BYTES))
    check.tensor("block_table", block_table, "int32", (None, None), fewest=num_reqs)
    if block_size < 1:
        raise ValueError(f"block_size must be positive, is {block_size}")
    if not 0 <= offset <= out.shape[1]:
        raise ValueError(f"offset {offset} is outside out, which has {out.shape[1]} rows per request")
    if gather_lens is not None and gather_lens.shape[0] < num_reqs:
        raise ValueError(f"gather_lens has {gather_lens.shape[0]} entries for {num_reqs} requests")
    if num_reqs == 0 or offset == out.shape[1]:
        return
    seq_lens = seq_lens.to(torch.int32).contiguous()
    gather_lens = seq_lens if gather_lens is None else gather_lens.to(torch.int32).contiguous()
    launch(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, max_gather_len)
