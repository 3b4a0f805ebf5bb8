"""`v1/attention/ops/common.py`: packing ragged queries into a batch, which stock does in the queries' own type.

The indexer's queries are e4m3, a type for which no Triton kernel compiles on SM8x. A row moves as it is, so its bytes
can be moved as well: `pack_seq_triton` of e4m3 is `pack_seq_triton` of uint8, which stock has, with the pad's own byte.
Who packs e4m3: the indexer's decode (`sparse_attn_indexer.py`), where requests have unequal numbers of queries; the
result is read under the requests' lengths. `unpack_seq_triton` takes back int32 indices and is stock's.

The indexer's constructor also registers that variant of the kernel for the warm-up at start (all four; unless
`enable_jit_warmup` is off), and a kernel that does not compile there ends the start: the keys are for uint8 here.
"""

from __future__ import annotations

from typing import Any

from .spec import Binding

MODULE = "v1.attention.ops.common"


def _pack(stock):
    """All four."""

    def pack_seq_triton(x, lengths, pad_value=float("-inf"), block_t=64, block_d=64):
        import torch

        if x.dtype != torch.float8_e4m3fn:
            return stock(x, lengths, pad_value, block_t, block_d)
        packed = stock(x.view(torch.uint8), lengths, _byte(pad_value), block_t, block_d)
        return packed.view(torch.float8_e4m3fn)

    return pack_seq_triton


def _warmup_keys(stock):
    """All four."""

    def get_warmup_keys(self, *, dtype, pad_value):
        import torch

        if dtype == torch.float8_e4m3fn:
            dtype, pad_value = torch.uint8, _byte(pad_value)
        return stock(self, dtype=dtype, pad_value=pad_value)

    return get_warmup_keys


def _byte(pad_value: Any) -> int:
    """The pad as stock's kernel stores it where it compiles: to the nearest e4m3 value, infinities to the largest."""
    from ..numerics import e4m3

    return e4m3.reference_encode(float(pad_value))


BINDINGS = (
    Binding("pack_seq_triton", "fp8_pack", (_pack,)),
    Binding("PackSeqTritonKernel.get_warmup_keys", "fp8_pack", (_warmup_keys,)),
)
