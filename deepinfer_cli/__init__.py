"""DeepInfer: installs, verifies, measures and takes back the SM8x overlay for vLLM."""

from __future__ import annotations

# one number for both: the overlay ships with the tool that installs it
from deepinfer_sm80 import __version__

__all__ = ["__version__"]
