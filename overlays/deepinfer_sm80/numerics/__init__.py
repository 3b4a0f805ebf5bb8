"""Number formats of the KV cache: decode and encode for Triton kernels, each with its own reference."""
