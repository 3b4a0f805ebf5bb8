"""DeepInfer's overlay for compute capability 8.x."""

__version__ = "0.1.0"
