"""The TileLang kernels of the mHC ops: which are launched for how many tokens, and their launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from ... import tile
from ..spec import TileVariant
from . import finish, post, project

if TYPE_CHECKING:
    import torch

# the width of DeepSeek-V4.1, which the tables were measured at
HIDDEN = 5120
# TileLang 0.1.12 hoists a condition out of a loop and drops what its other branch holds
PASS_CONFIGS = {"tl.disable_loop_unswitching": True}


@dataclass(frozen=True)
class Projection:
    """Geometry of the first kernel; see `project.build`."""

    block_m: int
    block_h: int
    blocks: int
    threads: int
    engine: str = "mma"

    @property
    def slice_columns(self) -> int:
        return self.block_h * self.blocks


@dataclass(frozen=True)
class Finish:
    """Geometry of the second kernel; see `finish.build`."""

    tokens: int
    threads: int
    parts: int


@dataclass(frozen=True)
class Post:
    """Geometry of the post kernel; see `post.build`."""

    threads: int
    vectors: int


class Row(NamedTuple):
    """What is launched for up to `tokens` tokens, and the measurement behind it."""

    tokens: int | None
    projection: Projection
    finish: Finish
    measured: str = ""


# last row: any number of tokens
PRE_TABLE = (
    Row(48, Projection(16, 64, 1, 192), Finish(1, 256, 1)),
    Row(64, Projection(16, 64, 2, 192), Finish(1, 256, 1)),
    Row(128, Projection(16, 64, 4, 192), Finish(1, 256, 1)),
    Row(None, Projection(16, 64, 8, 192), Finish(8, 256, 1)),
)
FUSED_TABLE = PRE_TABLE
POST_TABLE = ((None, Post(128, 1)),)
SQRSUM_TABLE = ((None, Post(640, 1)),)
# where the hidden size does not divide into the table's slices
FALLBACK = Projection(16, 64, 1, 192)


def row_for(table: tuple[Row, ...], tokens: int, hidden: int) -> Row:
    """The row of `table` for so many tokens, with a projection that covers `hidden` columns.

    Raises:
        ValueError: no projection covers them.
    """
    row = next(row for row in table if row.tokens is None or tokens <= row.tokens)
    if hidden % row.projection.slice_columns == 0:
        return row
    if hidden % FALLBACK.slice_columns:
        raise ValueError(f"hidden must be a multiple of {FALLBACK.slice_columns}, got {hidden}")
    return row._replace(projection=FALLBACK)


@lru_cache
def projection_variant(
    geometry: Projection, source: project.Source, hidden: int = HIDDEN, measured: str = ""
) -> TileVariant:
    g = geometry
    return TileVariant(
        f"mhc-project-{source}-{hidden}-{g.block_m}x{g.block_h}x{g.blocks}-{g.threads}-{g.engine}",
        partial(project.build, hidden, source, g.block_m, g.block_h, g.blocks, g.threads, g.engine),
        expects_mma=g.engine == "mma",
        pass_configs=PASS_CONFIGS,
        measured=measured,
    )


@lru_cache
def finish_variant(geometry: Finish, slices: int, hidden: int = HIDDEN) -> TileVariant:
    g = geometry
    return TileVariant(
        f"mhc-finish-{hidden}-{slices}-{g.tokens}-{g.threads}-{g.parts}",
        partial(finish.build, hidden, slices, g.tokens, g.threads, g.parts),
        pass_configs=PASS_CONFIGS,
    )


@lru_cache
def post_variant(geometry: Post, sqrsum: bool, hidden: int = HIDDEN) -> TileVariant:
    g = geometry
    return TileVariant(
        f"mhc-post-{hidden}-{g.threads}x{g.vectors}{'-sqrsum' if sqrsum else ''}",
        partial(post.build, hidden, g.threads, g.vectors, sqrsum),
        pass_configs=PASS_CONFIGS,
    )


def pre_variants(
    table: tuple[Row, ...], sources: tuple[project.Source, ...], hidden: int = HIDDEN
) -> Iterator[TileVariant]:
    """Every variant that `table` can launch."""
    for row in table:
        row = row_for((row._replace(tokens=None),), 1, hidden)
        for source in sources:
            yield projection_variant(row.projection, source, hidden, row.measured)
        yield finish_variant(row.finish, hidden // row.projection.slice_columns, hidden)


def post_variants(
    table: tuple[tuple[int | None, Post], ...], sqrsum: bool, hidden: int = HIDDEN
) -> Iterator[TileVariant]:
    """Every variant that `table` can launch."""
    for _, geometry in table:
        yield post_variant(geometry, sqrsum, hidden)


def warm_up(hidden: int = HIDDEN) -> None:
    """Compiles every variant that an engine of this hidden size can meet, for any number of tokens.

    Raises:
        tile.NoDeviceError: there is no device to compile for.
        ValueError: the kernels do not cover this hidden size.
    """
    tile.warm_up(
        {
            variant.name: variant
            for variant in (
                *pre_variants(PRE_TABLE, ("residual", "x"), hidden),
                *pre_variants(FUSED_TABLE, ("post",), hidden),
                *post_variants(POST_TABLE, False, hidden),
            )
        }.values()
    )


class Weights(NamedTuple):
    """What turns a projected row into coefficients: two tensors, the eps values and factors of the contract."""

    hc_scale: torch.Tensor
    hc_base: torch.Tensor
    rms_eps: float
    hc_pre_eps: float
    hc_sinkhorn_eps: float
    hc_post_mult_value: float
    sinkhorn_repeat: int


class Outputs(NamedTuple):
    """Buffers that a pre step writes; `post` `[T, 4]`, `comb` `[T, 16]`, `layer_input` `[T, H]`, `next_pre` `[T, 4]`."""

    post: torch.Tensor
    comb: torch.Tensor
    layer_input: torch.Tensor
    next_pre: torch.Tensor


def launch_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb_mix: torch.Tensor,
    new_residual: torch.Tensor,
    sqrsum: torch.Tensor | None = None,
) -> None:
    """Launches the post kernel on checked arguments; `post_mix` `[T, 4]`, `comb_mix` `[T, 16]`."""
    tokens, _, hidden = residual.shape
    table = POST_TABLE if sqrsum is None else SQRSUM_TABLE
    geometry = next(geometry for most, geometry in table if most is None or tokens <= most)
    kernel = tile.kernel(post_variant(geometry, sqrsum is not None, hidden))
    sums = () if sqrsum is None else (sqrsum,)
    kernel(residual, x, post_mix, comb_mix, new_residual, *sums)


def launch_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    weights: Weights,
    outputs: Outputs,
    *,
    pre_mix: torch.Tensor | None,
    x: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> None:
    """Launches both kernels of a pre step on checked arguments."""
    tokens, _, hidden = residual.shape
    row = row_for(PRE_TABLE, tokens, hidden)
    source: project.Source = "residual" if x is None else "x"
    parts = scratch(row, residual)
    # without a pre-mix its place is taken by a tensor of its shape that is not read
    mix = outputs.next_pre if pre_mix is None else pre_mix
    rows = (residual,) if x is None else (residual, x)
    tile.kernel(projection_variant(row.projection, source, hidden, row.measured))(
        *rows, mix, fn.view(project.MIXES, -1, hidden), outputs.layer_input, parts, int(pre_mix is not None)
    )
    launch_finish(row, parts, fn.shape[1], weights, outputs, norm_weight, norm_eps)


def launch_fused(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb_mix: torch.Tensor,
    fn: torch.Tensor,
    weights: Weights,
    new_residual: torch.Tensor,
    outputs: Outputs,
    *,
    pre_mix: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    aux: torch.Tensor | None,
) -> None:
    """Launches both kernels of a post step and the pre step after it on checked arguments."""
    tokens, _, hidden = residual.shape
    row = row_for(FUSED_TABLE, tokens, hidden)
    parts = scratch(row, residual)
    tile.kernel(projection_variant(row.projection, "post", hidden, row.measured))(
        residual,
        x,
        post_mix,
        comb_mix,
        outputs.next_pre if pre_mix is None else pre_mix,
        fn.view(project.MIXES, -1, hidden),
        new_residual,
        outputs.layer_input,
        outputs.layer_input if aux is None else aux,
        parts,
        int(pre_mix is not None),
        int(aux is not None),
    )
    launch_finish(row, parts, fn.shape[1], weights, outputs, norm_weight, norm_eps)


def scratch(row: Row, residual: torch.Tensor) -> torch.Tensor:
    """Parts of the slices, `[S, T, 26]` f32: 104 bytes a token and slice, taken from torch's allocator at each call."""
    tokens, _, hidden = residual.shape
    slices = hidden // row.projection.slice_columns
    return residual.new_empty((slices, tokens, project.PARTS), dtype=_float32())


def launch_finish(
    row: Row,
    parts: torch.Tensor,
    numel: int,
    weights: Weights,
    outputs: Outputs,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> None:
    """Launches the second kernel; without a norm weight it makes the coefficients only."""
    slices, tokens, _ = parts.shape
    hidden = outputs.layer_input.shape[1]
    tile.kernel(finish_variant(row.finish, slices, hidden))(
        parts,
        weights.hc_scale,
        weights.hc_base,
        # an unread tensor of its shape where there is none
        outputs.layer_input[0] if norm_weight is None else norm_weight,
        outputs.layer_input,
        outputs.post,
        outputs.comb,
        outputs.next_pre,
        weights.rms_eps,
        weights.hc_pre_eps,
        weights.hc_sinkhorn_eps,
        weights.hc_post_mult_value,
        weights.sinkhorn_repeat,
        1.0 / numel,
        norm_eps,
        0 if norm_weight is None else tokens,
    )


@lru_cache
def _float32() -> torch.dtype:
    import torch

    return torch.float32
