"""What `mhc_post` can launch."""

from __future__ import annotations

from ..mhc.tilelang import post_variants
from ..spec import TileVariant


def variants(arch: str) -> tuple[TileVariant, ...]:
    """Every variant that may be launched on `arch`."""
    return tuple(variant for variant in post_variants(False) if arch in variant.archs)
