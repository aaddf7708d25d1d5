"""Packed sequences on a real GPU: by their own kernel, and gradients of half precision by flash."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
sys.path.insert(0, str(Path(__file__).parent))

import elsa_core as elsa  # noqa: E402

LENGTHS = {
    "mixed": ([256, 1, 0, 1000, 63, 577], [256, 1, 0, 1000, 63, 577]),
    "crossed": ([7, 300, 0, 65, 128], [70, 1, 4, 0, 2049]),
    "decode": ([1] * 7, [3000, 1, 0, 9000, 64, 2049, 777]),  # by stream-K
}


def bounds(lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return starts.to(device="cuda", dtype=torch.int32)


def operands(case, dtype, heads=6, kv_heads=3, dim=64, seed=0):
    torch.manual_seed(seed)
    queries, keys = LENGTHS[case]
    shapes = ((sum(queries), heads, dim), (sum(keys), kv_heads, dim), (sum(keys), kv_heads, dim))
    q, k, v = (torch.randn(s, device="cuda").to(dtype) for s in shapes)
    return q, k, v, bounds(queries), bounds(keys)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_nothing_waits_where_the_longest_is_given(backend):
    given = operands("mixed", torch.float32)
    elsa.varlen_attention(*given, 1000, 1000, enable_gqa=True, backend=backend)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        elsa.varlen_attention(*given, 1000, 1000, enable_gqa=True, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_new_lengths_in_a_recorded_graph():
    """A graph that was recorded with other lengths serves these: they are data."""
    q, k, v, starts, _ = operands("mixed", torch.float32, kv_heads=6)
    static = starts.clone()
    elsa.varlen_attention(q, k, v, static, max_seqlen_q=1000, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = elsa.varlen_attention(q, k, v, static, max_seqlen_q=1000, backend="triton")
    others = bounds([1000, 0, 600, 200, 1, 96])
    static.copy_(others)
    graph.replay()
    assert torch.equal(out, elsa.varlen_attention(q, k, v, others, backend="triton"))
