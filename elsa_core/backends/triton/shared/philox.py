"""The keep mask of dropout in Triton: the bits of `elsa_core.backends.philox`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def drawn(Seed, threshold, kept):
    """What kernels hand on as `drop`: seed, offset, threshold and factor; None without a seed."""
    drop = None
    if Seed is not None:
        offset = (tl.load(Seed + 1) & 0xFFFFFFFF).to(tl.uint32)
        drop = (tl.load(Seed), offset, threshold, kept)
    return drop


@triton.jit
def keep(drop, head, row0, n0, BM: tl.constexpr, BN: tl.constexpr):
    """1.0 where a weight is kept, else 0.0: [BM, BN] from query row0 and key n0, a multiple of 4.

    head: i_batch * heads + i_head. One counter decides on four keys side by side.
    """
    seed, offset, threshold, _ = drop
    keys = (n0 // 4 + tl.arange(0, BN // 4)).to(tl.uint32)[None, :]
    rows = (row0 + tl.arange(0, BM)).to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox(seed, keys, rows, head.to(tl.uint32), offset)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return tl.where((words >> 1).to(tl.int32) >= threshold, 1.0, 0.0)
