"""What serving DeepSeek-V4.1 asks of a machine: layouts, memory and settings; pure functions, nothing is imported of vLLM."""
