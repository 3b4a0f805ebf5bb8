"""What `mhc_pre_delayed` can launch."""

from __future__ import annotations

from ..mhc.tilelang import PRE_TABLE, pre_variants
from ..spec import TileVariant


def variants(arch: str) -> tuple[TileVariant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in pre_variants(PRE_TABLE, ("residual", "x")) if arch in variant.archs)
