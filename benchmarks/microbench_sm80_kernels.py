#!/usr/bin/env python3
"""Microbenchmark of the cache gather (sparse MLA joins it): `--help` says what it takes."""

from __future__ import annotations

from microbench import main

if __name__ == "__main__":
    raise SystemExit(main(("gather",), __doc__))
