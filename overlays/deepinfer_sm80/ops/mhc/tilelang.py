"""The TileLang kernels of the mHC ops: which are launched for how many tokens, and their launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from ... import tile
from ..spec import TileVariant
from . import finish, post, project
from .coefficients import MIXES, Mixing
from .steps import PARTS, Source

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
    tiles: int = 1

    @property
    def slice_columns(self) -> int:
        return self.block_h * self.blocks


@dataclass(frozen=True)
class Finish:
    """Geometry of the second kernel; see `finish.build`."""

    tokens: int
    threads: int


@dataclass(frozen=True)
class Post:
    """Geometry of the post kernel; see `post.build`."""

    threads: int


class Row(NamedTuple):
    """What is launched for up to `tokens` tokens, and the measurement behind it."""

    tokens: int | None
    projection: Projection
    finish: Finish
    measured: str = ""


class PostRow(NamedTuple):
    """What post launches for up to `tokens` tokens, and the measurement behind it."""

    tokens: int | None
    geometry: Post
    measured: str = ""


# Both kernels of a step on an H200, sm80 code, in microseconds; in brackets stock's. The last row of a table: any
# number of tokens. More slices for few tokens and fewer for many: every slice leaves parts that the finish adds up. From
# 129 on it is worth more to split fn once for several tiles of tokens, of one block of columns; all take at most 48 KB.
PRE_TABLE = (
    Row(
        48,
        Projection(16, 64, 1, 192),
        Finish(1, 256),
        "6.6 at 1 token (13.0), 7.2 at 16 (12.7), 8.3 at 48 (19.7)",
    ),
    Row(64, Projection(16, 64, 2, 192), Finish(1, 256), "9.3 at 64 tokens (21.0)"),
    Row(128, Projection(16, 64, 4, 192), Finish(1, 256), "13.2 at 128 tokens (28.5)"),
    Row(
        None,
        Projection(32, 64, 1, 128, tiles=4),
        Finish(1, 256),
        "17.1, 22.8, 37.8, 66.1, 238 at 256, 512, 1,024, 2,048, 8,192 tokens; one tile in 8 slices: 20.6, 35.1, 51.4, 86.8, 331",
    ),
)
FUSED_TABLE = (
    PRE_TABLE[0]._replace(measured="7.2 at 1 token (12.1), 8.4 at 16 (13.0), 10.1 at 48 (24.7)"),
    PRE_TABLE[1]._replace(measured="11.7 at 64 tokens (25.9)"),
    PRE_TABLE[2]._replace(measured="16.3 at 128 tokens (33.3)"),
    PRE_TABLE[3]._replace(
        measured="22.3, 30.7, 53.9, 100.5, 345 at 256, 512, 1,024, 2,048, 8,192 tokens; one tile in 8 slices: 25.8, 45.6, 68.1, 115, 438"
    ),
)
POST_TABLE = (
    PostRow(512, Post(128), "5.2, 8.4, 14.6 at 128, 256, 512 tokens; 320 threads: 5.3, 8.4, 14.8"),
    PostRow(2048, Post(320), "26.2, 49.2 at 1,024, 2,048 tokens; 128 threads: 26.4, 49.9"),
    PostRow(None, Post(640), "93.6, 182.4 at 4,096, 8,192 tokens; 128 threads: 96.2, 188.5"),
)
# what 1,024 threads of eight columns cover; the sum of squares is made by one CTA
MOST_SUMMED = 8192


def row_for(table: tuple[Row, ...], tokens: int, hidden: int) -> Row:
    """The row of `table` for so many tokens, with a projection that covers `hidden` columns.

    Raises:
        ValueError: no projection covers them.
    """
    return _covering(next(row for row in table if row.tokens is None or tokens <= row.tokens), table, hidden)


def _covering(row: Row, table: tuple[Row, ...], hidden: int) -> Row:
    """`row`, with the first row's projection, whose slices are the narrowest, where `hidden` needs it."""
    narrow = table[0].projection
    if hidden % narrow.slice_columns:
        raise ValueError(f"hidden must be a multiple of {narrow.slice_columns}, got {hidden}")
    return row._replace(projection=narrow) if hidden % row.projection.slice_columns else row


def post_row_for(tokens: int, hidden: int, sqrsum: bool) -> PostRow:
    """What post launches for so many tokens; with the sum of squares one CTA takes a whole token.

    Raises:
        ValueError: no CTA covers `hidden` columns.
    """
    if not sqrsum:
        return next(row for row in POST_TABLE if row.tokens is None or tokens <= row.tokens)
    if hidden > MOST_SUMMED:
        raise ValueError(f"hidden must be at most {MOST_SUMMED} for a sum of squares, got {hidden}")
    warps = -(-hidden // (post.WARP * 8))
    return PostRow(None, Post(post.WARP * warps), "3.3 at 1 token, 57.3 at 2,048, 211 at 8,192")


@lru_cache
def projection_variant(
    geometry: Projection, source: Source, hidden: int = HIDDEN, measured: str = ""
) -> TileVariant:
    g = geometry
    return TileVariant(
        f"mhc-project-{source}-{hidden}-{g.block_m}x{g.block_h}x{g.blocks}-{g.threads}"
        + (f"-{g.tiles}-tiles" if g.tiles > 1 else ""),
        partial(project.build, hidden, source, g.block_m, g.block_h, g.blocks, g.threads, g.tiles),
        expects_mma=True,
        pass_configs=PASS_CONFIGS,
        measured=measured,
    )


@lru_cache
def finish_variant(geometry: Finish, slices: int, hidden: int = HIDDEN, measured: str = "") -> TileVariant:
    g = geometry
    return TileVariant(
        f"mhc-finish-{hidden}-{slices}-{g.tokens}-{g.threads}",
        partial(finish.build, hidden, slices, g.tokens, g.threads),
        pass_configs=PASS_CONFIGS,
        measured=measured,
    )


@lru_cache
def post_variant(geometry: Post, sqrsum: bool, hidden: int = HIDDEN, measured: str = "") -> TileVariant:
    return TileVariant(
        f"mhc-post-{hidden}-{geometry.threads}{'-sqrsum' if sqrsum else ''}",
        partial(post.build, hidden, geometry.threads, sqrsum),
        pass_configs=PASS_CONFIGS,
        measured=measured,
    )


def pre_variants(
    table: tuple[Row, ...], sources: tuple[Source, ...], hidden: int = HIDDEN
) -> Iterator[TileVariant]:
    """Every variant that `table` can launch, once; several rows may share one."""
    made: dict[str, TileVariant] = {}
    for row in table:
        row = _covering(row, table, hidden)
        slices = hidden // row.projection.slice_columns
        for variant in (
            *(projection_variant(row.projection, source, hidden, row.measured) for source in sources),
            finish_variant(row.finish, slices, hidden, row.measured),
        ):
            made.setdefault(variant.name, variant)
    yield from made.values()


def post_variants(sqrsum: bool, hidden: int = HIDDEN) -> Iterator[TileVariant]:
    """Every variant that post can launch, with or without the sum of squares."""
    for row in (post_row_for(1, hidden, True),) if sqrsum else POST_TABLE:
        yield post_variant(row.geometry, sqrsum, hidden, row.measured)


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
                *post_variants(False, hidden),
            )
        }.values()
    )


class Weights(NamedTuple):
    """What the second kernel takes from the model: what makes coefficients of mixes, and the norm of the layer input."""

    hc_scale: torch.Tensor
    hc_base: torch.Tensor
    mixing: Mixing
    norm_weight: torch.Tensor | None
    norm_eps: float


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
    row = post_row_for(tokens, hidden, sqrsum is not None)
    kernel = tile.kernel(post_variant(row.geometry, sqrsum is not None, hidden, row.measured))
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
) -> None:
    """Launches both kernels of a pre step on checked arguments."""
    row = row_for(PRE_TABLE, *residual.shape[::2])
    parts = launch_projection(residual, fn, outputs.layer_input, outputs.next_pre, pre_mix=pre_mix, x=x)
    launch_finish(row, parts, fn.shape[1], weights, outputs)


def launch_projection(
    residual: torch.Tensor,
    fn: torch.Tensor,
    collapsed: torch.Tensor,
    unread: torch.Tensor,
    *,
    pre_mix: torch.Tensor | None,
    x: torch.Tensor | None,
) -> torch.Tensor:
    """Launches the first kernel of a pre step: writes `collapsed` `[T, H]`, returns the parts of the slices.

    Args:
        unread: `[T, 4]` f32, which takes the place of a pre-mix where there is none.
    """
    tokens, _, hidden = residual.shape
    row = row_for(PRE_TABLE, tokens, hidden)
    source: Source = "residual" if x is None else "x"
    parts = scratch(row, residual)
    tile.kernel(projection_variant(row.projection, source, hidden, row.measured))(
        *((residual,) if x is None else (residual, x)),
        unread if pre_mix is None else pre_mix,
        fn.view(MIXES, -1, hidden),
        collapsed,
        parts,
        int(pre_mix is not None),
    )
    return parts


def launch_fused(
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    fn: torch.Tensor,
    weights: Weights,
    new_residual: torch.Tensor,
    outputs: Outputs,
    *,
    pre_mix: torch.Tensor | None,
    aux: torch.Tensor | None,
) -> None:
    """Launches both kernels of a post step and the pre step after it on checked arguments.

    Args:
        step: what post takes: the sublayer's output, the residual, post-mix `[T, 4]`, residual mix `[T, 16]`.
    """
    x, residual, post_mix, comb_mix = step
    tokens, _, hidden = residual.shape
    row = row_for(FUSED_TABLE, tokens, hidden)
    parts = scratch(row, residual)
    tile.kernel(projection_variant(row.projection, "post", hidden, row.measured))(
        residual,
        x,
        post_mix,
        comb_mix,
        outputs.next_pre if pre_mix is None else pre_mix,
        fn.view(MIXES, -1, hidden),
        new_residual,
        outputs.layer_input,
        outputs.layer_input if aux is None else aux,
        parts,
        int(pre_mix is not None),
        int(aux is not None),
    )
    launch_finish(row, parts, fn.shape[1], weights, outputs)


def scratch(row: Row, residual: torch.Tensor) -> torch.Tensor:
    """Parts of the slices, `[S, T, 26]` f32: 104 bytes a token and slice, taken from torch's allocator at each call."""
    tokens, _, hidden = residual.shape
    slices = hidden // row.projection.slice_columns
    return residual.new_empty((slices, tokens, PARTS), dtype=_float32())


def launch_finish(
    row: Row,
    parts: torch.Tensor,
    numel: int,
    weights: Weights,
    outputs: Outputs,
) -> None:
    """Launches the second kernel; without a norm weight it makes the coefficients only."""
    slices, tokens, _ = parts.shape
    hidden = outputs.layer_input.shape[1]
    norm_weight, mixing = weights.norm_weight, weights.mixing
    tile.kernel(finish_variant(row.finish, slices, hidden, row.measured))(
        parts,
        weights.hc_scale,
        weights.hc_base,
        # an unread tensor of its shape where there is none
        outputs.layer_input[0] if norm_weight is None else norm_weight,
        outputs.layer_input,
        outputs.post,
        outputs.comb,
        outputs.next_pre,
        mixing.rms_eps,
        mixing.pre_eps,
        mixing.sinkhorn_eps,
        mixing.post_factor,
        mixing.iterations,
        1.0 / numel,
        weights.norm_eps,
        0 if norm_weight is None else tokens,
    )


@lru_cache
def _float32() -> torch.dtype:
    import torch

    return torch.float32
