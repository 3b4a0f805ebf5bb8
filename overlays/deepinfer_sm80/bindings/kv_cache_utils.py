"""`v1/core/kv_cache_utils.py`: where 0.30, 0.31 and 0.32 have what 0.33 has in `kv_cache_planning.py`."""

from __future__ import annotations

from .kv_cache_planning import BINDINGS

__all__ = ["BINDINGS", "MODULE"]

MODULE = "v1.core.kv_cache_utils"
