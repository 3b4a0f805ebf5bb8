"""V4.1's attention layer on SM8x: vLLM's portable class (written for ROCm, in Triton) as a CUDA layer.

`select` stands in for the function in which vLLM chooses the class. Importing this package imports neither torch nor vLLM,
and starts nothing: the class is made in the worker, when the first layer is built.
"""

from __future__ import annotations

from .choice import select

__all__ = ["select"]
