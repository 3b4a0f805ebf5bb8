"""TileLang variants as code, each compiled once for an architecture in a session of tests: it takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

Once = Callable[[str, Callable[[], str]], str]


def code_of(once: Once, variant: Any, arch: str) -> Any:
    """What `artifact.make` makes of a `TileVariant`; their names are their own across the ops."""
    from deepinfer_cli.validate import artifact

    def make() -> str:
        return json.dumps(asdict(artifact.make(variant, arch)))

    return artifact.Code(**json.loads(once(f"tilelang {variant.name} {arch}", make)))
