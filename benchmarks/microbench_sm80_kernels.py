#!/usr/bin/env python3
"""Microbenchmark of sparse MLA (decode and prefill) and of the cache gather: `--help` says what it takes."""

from __future__ import annotations

from microbench import main

if __name__ == "__main__":
    raise SystemExit(main(("sparse_decode", "sparse_prefill", "gather"), __doc__))
