#!/usr/bin/env python3
"""Microbenchmark of the Top-K/SWA combiner and of the ragged index builder: `--help` says what it takes."""

from __future__ import annotations

from microbench import main

if __name__ == "__main__":
    raise SystemExit(main(("combine", "ragged"), __doc__))
