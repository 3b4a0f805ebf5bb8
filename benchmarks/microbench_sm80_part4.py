#!/usr/bin/env python3
"""Microbenchmark of what stock vLLM has no SM8x kernel for, sparse MLA apart: `--help` says what it takes."""

from __future__ import annotations

from microbench import main

if __name__ == "__main__":
    ops = ("indexer_prefill", "indexer_decode", "indexer_q", "indexer_k", "kv_insert", "engram")
    raise SystemExit(main(ops, __doc__))
