#!/usr/bin/env python3
"""Microbenchmark of the mHC kernels: `--help` says what it takes. They need tilelang and nvcc besides torch."""

from __future__ import annotations

from microbench import main

OPS = ("mhc_fused_post_pre_delayed", "mhc_pre_delayed", "mhc_post", "mhc_post_with_sqrsum")

if __name__ == "__main__":
    raise SystemExit(main(OPS, __doc__))
