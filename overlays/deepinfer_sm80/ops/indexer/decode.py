"""The arithmetic of the indexer's logits: e4m3 codes, four to a word, as bf16 operands of a dot, and its score."""

from __future__ import annotations

import triton
import triton.language as tl

_REBIAS = tl.constexpr(2.0**120)


@triton.jit
def plane(words, BYTE: tl.constexpr):
    """The codes in byte `BYTE` of each word (int32 tensor) as bf16: exact, a code being 4 bits times a power of two.

    A dot over all four planes of q and k, one after the other, is the dot over their 128 codes in another order; rows
    of words need no shuffling for it. The two NaN codes give 480 and -480, what their bits would mean if they were
    numbers: a check of every code would cost as much as the rest of the decoding.
    """
    # magnitude to bits 20..26, sign to bit 31 (the shift right is arithmetic): 2^-120 of the value as float32
    bits = ((words << (24 - 8 * BYTE)) >> 4) & -0x78100000
    return (bits.to(tl.float32, bitcast=True) * _REBIAS).to(tl.bfloat16)


@triton.jit
def score(q0, q1, q2, q3, k0, k1, k2, k3, k_scale, weight, TOKENS: tl.constexpr, KEYS: tl.constexpr):
    """`[TOKENS, KEYS]` float32 scores: heads' positive products, weighted and added up, times the keys' scales.

    `q0` to `q3` are the planes of queries whose rows are 16 heads of every token, then the other 16; `k0` to `k3` those of keys.
    """
    dots = tl.dot(q0, tl.trans(k0))
    dots = tl.dot(q1, tl.trans(k1), dots)
    dots = tl.dot(q2, tl.trans(k2), dots)
    dots = tl.dot(q3, tl.trans(k3), dots)
    parts = tl.reshape(tl.maximum(dots, 0.0) * weight[:, None], (2, TOKENS, 16, KEYS))
    return tl.sum(tl.sum(parts, axis=0), axis=1) * k_scale[None, :]
