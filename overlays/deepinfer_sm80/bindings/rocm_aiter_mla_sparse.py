"""`v1/attention/ops/rocm_aiter_mla_sparse.py`: sparse MLA attention and the ragged indices it reads.

What V4.1's attention class (`amd/rocm.py`) relies on, by release:

- `_forward_prefill` (all four) passes `combine_topk_swa_indices`' dense rows and lengths, -1 among them, and reads
  `output` rows as they are: nothing is rotated. Ours takes the dense rows, so no ragged table is built on that path.
- `_forward_decode` (all four) always passes both ragged lists, except the compressed one where the layer has none
  (`swa_only`). In 0.30 nobody reads its result, and `_o_proj` rotates every row later. From 0.31 on it passes
  `inv_rope_positions`, and `forward_mqa` rotates the rows from the returned number on: what was rotated here must be
  counted there, and only that. Stock returns the number of rows and, off two AMD cards, rotates none of them.
- The decode metadata builder (all four) packs the sliding-window rows with `build_ragged_indices_from_dense` and copies
  `flat` and `indptr` whole into buffers that outlive a CUDA graph. The lists feed attention and nothing else.

Other callers: V4's `amd/rocm.py` (the same shapes), `backends/mla/rocm_aiter_mla_sparse.py` (576-wide rows: to stock).
"""

from __future__ import annotations

from typing import Any

from .spec import BindError, Binding

MODULE = "v1.attention.ops.rocm_aiter_mla_sparse"
HEAD_DIMS = (512, 448, 64)
MAX_HEADS = 128
BUILD = "build_ragged_indices_from_dense"
# the kernel that the stock function launches → whether entries that are no row of the table lose their place
CONTRACTS = {"_pack_dense_prefix_to_ragged_kernel": False, "_count_valid_row_entries_kernel": True}


def _build(stock):
    """All four have the same parameters; what it does with -1 changed in 0.32, and its kernels with it."""
    compact = True in _contracts(stock)

    def build_ragged_indices_from_dense(indices, lengths, num_rows=-1):
        from .. import warm
        from ..ops.ragged import build_ragged

        warm.first_call("ragged")
        return build_ragged(indices, lengths, num_rows, compact=compact)

    return build_ragged_indices_from_dense


def _contracts(stock: Any) -> set[bool]:
    """The contracts of the kernels that the stock function's own code names: the signature does not tell."""
    names = getattr(getattr(stock, "__code__", None), "co_names", ())
    return {compact for kernel, compact in CONTRACTS.items() if kernel in names}


def _check_contract(stock: Any) -> None:
    found = _contracts(stock)
    if len(found) != 1:
        raise BindError(f"names {'both' if found else 'none'} of the kernels {', '.join(CONTRACTS)}")


def _prefill(stock):
    """All four. Rows of another width or type go to stock, whose kernel compiles on SM8x."""

    # fmt: off
    def rocm_sparse_attn_prefill(
        q, kv, indices, topk_length, scale, head_dim, nope_head_dim, rope_head_dim, attn_sink, output,
        ragged_indices=None, ragged_indptr=None,
    ):
        # fmt: on
        if not (_attends(q, output, (head_dim, nope_head_dim, rope_head_dim)) and _is_workspace(kv)):
            return stock(
                q, kv, indices, topk_length, scale, head_dim, nope_head_dim, rope_head_dim, attn_sink, output,
                ragged_indices, ragged_indptr,
            )  # fmt: skip
        from .. import warm
        from ..ops.sparse_prefill import sparse_prefill

        warm.first_call("sparse_prefill")
        rows = _prefill_rows(indices, topk_length, ragged_indices, ragged_indptr)
        sparse_prefill(q, kv.squeeze(1), output, scale, _sink(attn_sink), **rows)

    return rocm_sparse_attn_prefill


def _prefill_rows(indices: Any, lengths: Any, ragged_indices: Any, ragged_indptr: Any) -> dict[str, Any]:
    """The ragged lists where both are given, as in stock; else the dense rows, of which only valid slots count."""
    if ragged_indices is not None and ragged_indptr is not None:
        return {"indices": _int32(ragged_indices), "indptr": _int32(ragged_indptr)}
    if indices is None:
        raise ValueError("rocm_sparse_attn_prefill needs indices, or ragged_indices and ragged_indptr")
    dense = indices.reshape(indices.shape[0], -1)
    return {"indices": _int32(dense), "lengths": _int32(_lengths(dense, lengths))}


def _decode(stock):
    """0.30: returns nothing and rotates nothing."""

    # fmt: off
    def rocm_sparse_attn_decode(
        q, kv_cache, swa_k_cache, swa_only, topk_indices, topk_lens, swa_indices, swa_lens,
        swa_ragged_indices, swa_ragged_indptr, topk_ragged_indices, topk_ragged_indptr, attn_sink, scale,
        head_dim, nope_head_dim, rope_head_dim, output, extra_cache_nan_free=False, adaptive_splits=False,
    ):
        # fmt: on
        if not _attends(q, output, (head_dim, nope_head_dim, rope_head_dim)):
            return stock(
                q, kv_cache, swa_k_cache, swa_only, topk_indices, topk_lens, swa_indices, swa_lens,
                swa_ragged_indices, swa_ragged_indptr, topk_ragged_indices, topk_ragged_indptr, attn_sink, scale,
                head_dim, nope_head_dim, rope_head_dim, output, extra_cache_nan_free, adaptive_splits,
            )  # fmt: skip
        from .. import warm
        from ..ops.sparse_decode import sparse_decode

        warm.first_call("sparse_decode")
        swa = (swa_k_cache, swa_indices, swa_lens, swa_ragged_indices, swa_ragged_indptr)
        extra = None if swa_only else (kv_cache, topk_indices, topk_lens, topk_ragged_indices, topk_ragged_indptr)
        sparse_decode(q, output, scale=scale, sink=_sink(attn_sink), **_lists(stock, swa, extra))

    return rocm_sparse_attn_decode


def _decode_rotating(stock):
    """0.31 and later: the result is the number of rows that are rotated already.

    Calls that go to stock are made without positions and return 0: stock rotates on two AMD cards only, whatever it
    returns, so the caller must. `extra_cache_nan_free` and `adaptive_splits` tune AMD's kernels; ours removes every
    NaN and chooses its splits itself.
    """

    # fmt: off
    def rocm_sparse_attn_decode(
        q, kv_cache, swa_k_cache, swa_only, topk_indices, topk_lens, swa_indices, swa_lens,
        swa_ragged_indices, swa_ragged_indptr, topk_ragged_indices, topk_ragged_indptr, attn_sink, scale,
        head_dim, nope_head_dim, rope_head_dim, output, extra_cache_nan_free=False, adaptive_splits=False,
        inv_rope_positions=None, inv_rope_cos_sin_cache=None, output_mxfp8=None,
    ):
        # fmt: on
        if output_mxfp8 is not None:
            raise ValueError("output_mxfp8 is an output of AMD's gfx950, there is none on an NVIDIA card")
        if not _attends(q, output, (head_dim, nope_head_dim, rope_head_dim)):
            stock(
                q, kv_cache, swa_k_cache, swa_only, topk_indices, topk_lens, swa_indices, swa_lens,
                swa_ragged_indices, swa_ragged_indptr, topk_ragged_indices, topk_ragged_indptr, attn_sink, scale,
                head_dim, nope_head_dim, rope_head_dim, output, extra_cache_nan_free, adaptive_splits,
            )  # fmt: skip
            return 0
        from .. import warm
        from ..ops.sparse_decode import sparse_decode

        warm.first_call("sparse_decode")
        swa = (swa_k_cache, swa_indices, swa_lens, swa_ragged_indices, swa_ragged_indptr)
        extra = None if swa_only else (kv_cache, topk_indices, topk_lens, topk_ragged_indices, topk_ragged_indptr)
        rotation = _rotation(inv_rope_positions, inv_rope_cos_sin_cache, rope_head_dim)
        sparse_decode(q, output, scale=scale, sink=_sink(attn_sink), **_lists(stock, swa, extra), **rotation)
        return output.shape[0] if rotation else 0

    return rocm_sparse_attn_decode


def _attends(q: Any, output: Any, head_dims: tuple[int, int, int]) -> bool:
    """Whether ours serves these queries: V4.1's head, bfloat16 in and out, contiguous rows."""
    import torch

    return bool(
        head_dims == HEAD_DIMS
        and q.dim() == 3
        and q.shape == output.shape
        and q.shape[1] <= MAX_HEADS
        and q.shape[2] == HEAD_DIMS[0]
        and q.dtype == output.dtype == torch.bfloat16
        and q.stride(2) == output.stride(2) == 1
    )


def _is_workspace(kv: Any) -> bool:
    """Whether `kv` is what gather fills: `[rows, 1, 512]` of bfloat16."""
    import torch

    return bool(
        kv.dim() == 3
        and kv.shape[1:] == (1, HEAD_DIMS[0])
        and kv.dtype == torch.bfloat16
        and kv.stride(2) == 1
    )


def _lists(stock: Any, swa: tuple[Any, ...], extra: tuple[Any, ...] | None) -> dict[str, Any]:
    """The caches and their ragged lists, as the op takes them."""
    if extra is None:
        return _list("swa", stock, *swa)
    if extra[0] is None:
        raise ValueError("rocm_sparse_attn_decode needs kv_cache unless swa_only is set")
    return _list("swa", stock, *swa) | _list("extra", stock, *extra)


def _list(
    name: str, stock: Any, cache: Any, indices: Any, lengths: Any, ragged: Any, indptr: Any
) -> dict[str, Any]:
    """A cache with its ragged list; packed from the dense rows where the caller has none, as stock does."""
    if ragged is not None and indptr is not None:
        lists = _int32(ragged), _int32(indptr)
    elif indices is None:
        raise ValueError("rocm_sparse_attn_decode needs dense or ragged indices for each cache")
    else:
        dense = indices.reshape(indices.shape[0], -1)
        # by way of the module, so that it is ours only where that op is bound
        build = stock.__globals__[BUILD]
        lists = build(dense, _lengths(dense, lengths), num_rows=cache.shape[0] * cache.shape[1])
    return {f"{name}_cache": cache, f"{name}_indices": lists[0], f"{name}_indptr": lists[1]}


def _rotation(positions: Any, cos_sin_cache: Any, rope_head_dim: int) -> dict[str, Any]:
    """What rotates the output here; empty where the caller must do it, as with a table that ours does not read."""
    import torch

    if positions is None or cos_sin_cache is None or cos_sin_cache.dtype != torch.float32:
        return {}
    if cos_sin_cache.shape[-1] != rope_head_dim or cos_sin_cache.stride(-1) != 1:
        return {}
    return {"positions": positions.to(torch.int64).contiguous(), "cos_sin_cache": cos_sin_cache}


def _lengths(dense: Any, lengths: Any) -> Any:
    """As in stock, which without lengths takes as many entries of a row as it has valid ones."""
    import torch

    return (dense >= 0).sum(dim=-1, dtype=torch.int32) if lengths is None else lengths.reshape(-1)


def _int32(tensor: Any) -> Any:
    import torch

    return tensor.to(torch.int32).contiguous()


def _sink(attn_sink: Any) -> Any:
    return None if attn_sink is None else attn_sink.float().contiguous()


BINDINGS = (
    Binding(BUILD, "ragged", (_build,), _check_contract),
    Binding("rocm_sparse_attn_prefill", "sparse_prefill", (_prefill,)),
    Binding("rocm_sparse_attn_decode", "sparse_decode", (_decode, _decode_rotating)),
)
