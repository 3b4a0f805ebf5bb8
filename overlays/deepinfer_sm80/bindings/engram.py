"""V4.1's `common/engram.py`: the table lookup, whose stock kernel takes the codes as fp8 and so does not compile on SM8x.

One signature in all four releases, and one caller for each kind of table: the staging of a layer's rows (inside the CUDA
graph where the table is on the GPU, on a stream of its own where it is in host memory, then with `background`) and
`forward`. What the method itself takes care of in the releases, and how ours does it:

- Where the table is: `_storage` gives the codes and scales as CUDA tensors, views of pinned memory for host tables
  (0.30 and 0.31: in a subclass, `nvidia/engram.py`, which inherits the lookup).
- 0.33: with data parallelism and NVLink each rank keeps a part of one table, `peer_ptrs` are the parts' addresses.
- 0.32 and later sort the ids of large lookups in host tables first, on Blackwell alone; the rows are the same.
- 0.32 and later can write packed fp8 rows, for FlashInfer's MXFP8 product; no linear of a card before Blackwell asks
  for them (`EngramBatch.create`), so ours refuses them.
"""

from __future__ import annotations

from .spec import Binding

MODULE = "models.{layout}.common.engram"


def _lookup(stock):
    """All four."""

    def lookup(self, indices, out, background=False):
        import torch

        from .. import warm
        from ..ops.engram import BLOCK, engram

        if out.dtype != torch.bfloat16:
            raise ValueError(f"packed Engram rows ({out.dtype}) are for MXFP8 products, which SM8x has not")
        if self.block_size != BLOCK:
            raise ValueError(f"Engram scales for {self.block_size} elements are not served, only for {BLOCK}")
        warm.first_call("engram")
        weight, scales = self._storage()
        peer_rows = getattr(self, "peer_rows", 0)
        engram(
            out, indices[:, : self.n_hash_cols], weight, scales,
            head_start=self.head_start, vocab_start=self.vocab_start_idx, vocab_end=self.vocab_end_idx,
            peers=self.peer_ptrs if peer_rows else None, peer_rows=peer_rows, background=background,
        )  # fmt: skip

    return lookup


BINDINGS = (Binding("ParallelEngramEmbedding.lookup", "engram", (_lookup,)),)
