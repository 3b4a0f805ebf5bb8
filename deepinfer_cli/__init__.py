"""DeepInfer: installs, verifies, measures and takes back the SM8x overlay for vLLM."""
