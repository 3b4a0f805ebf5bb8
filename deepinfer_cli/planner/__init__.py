"""What DeepSeek-V4.1 takes of GPUs in each layout: weights, buffers and vLLM's own KV cache accounting, from published shapes."""
