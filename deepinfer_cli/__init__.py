"""DeepInfer: installs, verifies, measures and takes back the SM8x overlay for vLLM."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    """`__version__`, one number for the tool and the overlay it ships; read when asked for: start-up time."""
    if name == "__version__":
        from deepinfer_sm80 import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
