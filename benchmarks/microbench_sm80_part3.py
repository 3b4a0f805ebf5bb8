#!/usr/bin/env python3
"""Microbenchmark of the Top-K/SWA combiner: `--help` says what it takes."""

from __future__ import annotations

from microbench import main

if __name__ == "__main__":
    raise SystemExit(main(("combine",), __doc__))
