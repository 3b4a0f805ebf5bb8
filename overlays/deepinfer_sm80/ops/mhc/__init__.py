"""What the mHC ops share: the oracle, the inputs of their workloads, and the TileLang kernels."""
