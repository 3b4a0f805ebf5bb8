"""Combines Top-K and sliding-window indices into one row of workspace indices per query token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# widths are rounded up to what sparse prefill kernels take
ALIGNMENT = 128


def combine(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    replay_clamp: bool,
    width_cap: bool,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the workspace rows each query token attends to: its Top-K, then its window, then -1.

    Query token i of request b has position `pos = seq_len - query_len + i`. Its row is

    - `n = min((pos + 1) // compress_ratio, topk)` Top-K entries, `index + M * b`, or -1 for an index outside `[0, N)`;
    - `m` window entries, `M * b + N + p - (seq_len - gather_len)` for each p in `[start, pos]`, where `start` is
      `pos - window_size + 1`, at least 0 and, with `replay_clamp`, at least `seq_len - gather_len`;
    - -1 up to the width. The length is `n + m`; -1 may stand inside it.

    Args:
        topk_indices: int32 `[T, W]` (or more dims, flattened to this), positions within the request's compressed rows.
        query_start_loc: int32 `[R + 1]`; its first entry is subtracted from all.
        seq_lens, gather_lens: int32 `[R]`.
        window_size: positions in the sliding window, the token's own included.
        compress_ratio: tokens per compressed row; 0 means no Top-K part.
        topk: most Top-K entries of a row.
        M: workspace rows per request.
        N: compressed rows of a request; its window rows follow.
        replay_clamp: keep the window inside what was gathered (common op of vLLM 0.31 and later).
        width_cap: at most W Top-K entries (ROCm op of 0.30 and 0.31). Without it, entries beyond W are -1; stock reads
            past the row there.
        out: buffers to fill, int32 `[>= T, >= topk + window_size]` and `[>= T]`; otherwise they are made, with the width
            rounded up to 128.

    Returns:
        The indices and the lengths. Every element of `out`'s indices is written; of the lengths the first T.

    Raises:
        TypeError: a buffer in `out` is not int32.
        ValueError: a shape or a size does not fit.

    Notes:
        Where a release does not define a result, this does: lengths are never negative (0.30 and 0.31's common kernel
        stores before the row at the negative positions of warm-up batches); an index outside `[0, N)` is -1 (there it
        is stored as it is); tokens that belong to no request have length 0 (stock leaves it uninitialised); all of
        `out` is defined (from 0.30 to 0.32 what no token wrote keeps its old content).
    """
    import torch

    from .triton import launch

    if min(window_size, compress_ratio, topk, N) < 0:
        raise ValueError(
            f"negative size: window_size={window_size}, compress_ratio={compress_ratio}, topk={topk}, N={N}"
        )
    if topk_indices.dim() < 2:
        raise ValueError(f"topk_indices must have a row per token, has shape {tuple(topk_indices.shape)}")
    num_tokens, num_reqs = topk_indices.shape[0], seq_lens.shape[0]
    if query_start_loc.shape[0] < num_reqs + 1 or gather_lens.shape[0] < num_reqs:
        raise ValueError(
            f"{num_reqs} requests need as many gather_lens and one more query_start_loc,"
            f" got {gather_lens.shape[0]} and {query_start_loc.shape[0]}"
        )
    if out is None:
        width = -(-(topk + window_size) // ALIGNMENT) * ALIGNMENT
        indices = torch.empty((num_tokens, width), dtype=torch.int32, device=topk_indices.device)
        lens = torch.empty(num_tokens, dtype=torch.int32, device=topk_indices.device)
    else:
        indices, lens = out
        _check_out(indices, lens, num_tokens, topk + window_size)
    if indices.shape[0]:
        rows = topk_indices.flatten(1)
        launch(
            indices,
            lens,
            _int32(rows if rows.stride(1) == 1 else rows.contiguous()),
            *(_int32(vector).contiguous() for vector in (query_start_loc, seq_lens, gather_lens)),
            window_size=window_size,
            compress_ratio=compress_ratio,
            topk=min(topk, rows.shape[1]) if width_cap else topk,
            M=M,
            N=N,
            replay_clamp=replay_clamp,
        )
    return indices, lens


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.to(torch.int32)


def _check_out(indices: torch.Tensor, lens: torch.Tensor, num_tokens: int, width: int) -> None:
    import torch

    if indices.dtype != torch.int32 or lens.dtype != torch.int32:
        raise TypeError(f"out must be int32, is {indices.dtype} and {lens.dtype}")
    if indices.dim() != 2 or indices.shape[0] < num_tokens or indices.shape[1] < width:
        raise ValueError(f"out[0] must be at least {num_tokens} x {width}, is {tuple(indices.shape)}")
    if lens.dim() != 1 or lens.shape[0] < num_tokens:
        raise ValueError(f"out[1] must have at least {num_tokens} entries, has shape {tuple(lens.shape)}")
    if indices.stride(1) != 1 or lens.stride(0) != 1:
        raise ValueError(
            f"out must be contiguous along its last dim, strides {indices.stride()} and {lens.stride()}"
        )
