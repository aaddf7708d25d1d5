"""The stream-K schedule on a real GPU: errors, equal bits, tickets, graphs, streams."""

from __future__ import annotations

import random
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
sys.path.insert(0, str(Path(__file__).parent))

import elsa_core as elsa  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
RAGGED = {
    "rows": ([1] * 33, [1 + 577 * i for i in range(33)], 8, 8, F32),
    "rows half": ([1] * 33, [1 + 577 * i for i in range(33)], 8, 8, F16),
    "heads that share keys": ([1] * 33, [1 + 577 * i for i in range(33)], 16, 4, F16),
    "mixed": ([256, 1, 0, 1000, 63, 577], [256, 1, 0, 1000, 63, 577], 6, 3, F32),
    "mixed half": ([7, 300, 0, 65, 128], [70, 1, 4, 0, 2049], 6, 3, BF16),
    "many": ([1, 2, 0, 3] * 100, [2, 1, 5, 0] * 100, 2, 2, F16),
}


def attend(given, programs=None, least=None, is_causal=False):
    """(out, lse) by stream-K, whether or not it is the schedule of such calls."""
    from elsa_core.backends.triton.attention import varlen
    from elsa_core.backends.triton.attention.schedules import stream

    q, k, v, starts, others = given
    problem = varlen.problem_of(q, k, v, is_causal, q.shape[2] ** -0.5, "strict")
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    call = stream.streamed(problem, len(starts) - 1, programs, least)
    call(q, k, v, starts, others, out, lse)
    return out, lse


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def poison(*like):
    """Fill what the next allocations of these sizes find."""
    filled = [torch.full_like(t, torch.nan) for t in like]
    del filled


def check(found, exact, peer, dtype):
    out, lse = found
    assert out.isfinite().all()
    assert relative(out, exact[0]) <= 2 * relative(peer, exact[0]) + 4 * torch.finfo(dtype).eps
    assert torch.equal(lse.isneginf(), exact[1].isneginf())
    live = ~lse.isneginf()
    assert (lse[live] - exact[1][live]).abs().max() < (1e-5 if dtype == F32 else 5e-3)


def packed(name, seed=0):
    torch.manual_seed(seed)
    queries, keys, heads, kv_heads, dtype = RAGGED[name]
    dim = 128 if name.startswith("rows") else 64
    shapes = ((sum(queries), heads, dim), (sum(keys), kv_heads, dim), (sum(keys), kv_heads, dim))
    tensors = [torch.randn(s, device="cuda").to(dtype) for s in shapes]
    starts = [
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
        for lengths in (queries, keys)
    ]
    return (*tensors, *starts), dtype


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", RAGGED)
def test_packed_agrees_with_float64(name, is_causal):
    given, dtype = packed(name)
    options = {"enable_gqa": True, "return_lse": True, "is_causal": is_causal}
    wide = (*(t.double() for t in given[:3]), *given[3:])
    exact = elsa.varlen_attention(*wide, backend="eager", **options)
    peer = elsa.varlen_attention(*given, backend="eager", **options)
    poison(*peer, *peer)
    found = attend(given, is_causal=is_causal)
    for _ in range(10):
        again = attend(given, is_causal=is_causal)
        assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])
    check(found, exact, peer[0], dtype)


@pytest.mark.parametrize("programs", [None, 77, 1024])
@pytest.mark.parametrize("name", ["rows", "heads that share keys"])
def test_grids_of_other_sizes_agree(name, programs):
    given, dtype = packed(name)
    wide = (*(t.double() for t in given[:3]), *given[3:])
    options = {"enable_gqa": True, "return_lse": True, "backend": "eager"}
    exact, peer = (elsa.varlen_attention(*each, **options) for each in (wide, given))
    check(attend(given, programs, 1), exact, peer[0], dtype)


@pytest.mark.parametrize("times", [1e15, 1e-39, 0.0])
@pytest.mark.parametrize("name", ["rows", "mixed"])
def test_extreme_inputs(name, times):
    """What a split cannot hold is folded with float32 FMA, share by share."""
    (q, k, v, *starts), _ = packed(name)
    given = (q * times, k * times, v, *starts)
    wide = (*(t.double() for t in given[:3]), *starts)
    options = {"enable_gqa": True, "backend": "eager"}
    exact, peer = (elsa.varlen_attention(*each, **options) for each in (wide, given))
    out, _ = attend(given, 50, 1)
    assert out.isfinite().all()
    assert relative(out, exact) <= 2 * relative(peer, exact) + 1e-6


def test_tickets_are_left_at_zero():
    from elsa_core.backends.triton.shared import tickets

    given, _ = packed("rows")
    attend(given)
    torch.cuda.synchronize()
    assert tickets._of_streams and not any(t.any() for t in tickets._of_streams.values())


def test_graphs_and_streams_at_once():
    """Launches that may run at once share no tickets."""
    cases = [packed("rows half", seed)[0] for seed in range(4)]
    expected = [attend(given, least=1)[0].clone() for given in cases]
    graphs, outs = [], []
    for given in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(attend(given, least=1)[0])
        graphs.append(graph)
    lanes = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, lane in zip(graphs, lanes, strict=True):
            with torch.cuda.stream(lane):
                graph.replay()
        eager = []
        for given, lane in zip(cases, reversed(lanes), strict=True):
            with torch.cuda.stream(lane):
                eager.append(attend(given, least=1)[0])
        torch.cuda.synchronize()
        for found in (outs, eager):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["rows", "rows half", "mixed", "heads that share keys"])
def test_random_delays_change_no_bit(name):
    """Two streams at once, each held up for a random time ahead of its inputs and of its calls: a
    launch that waits for the wrong one, or memory that two calls share, would show.
    """
    draw, sides = random.Random(0), [torch.cuda.Stream(), torch.cuda.Stream()]
    cases = [packed(name, seed)[0] for seed in range(2)]
    expected = [[t.clone() for t in attend(given, least=1)] for given in cases]
    torch.cuda.synchronize()
    for _ in range(30):
        found = [[], []]
        for lane in (0, 1, 0, 1):
            with torch.cuda.stream(sides[lane]):
                torch.cuda._sleep(draw.randrange(400_000))
                late = [t.clone() for t in cases[lane]]
                torch.cuda._sleep(draw.randrange(100_000))
                poison(*late[:3])
                found[lane].append(attend(late, least=1))
                late[0].zero_()  # behind the call, which has read it
        torch.cuda.synchronize()
        for lane, calls in enumerate(found):
            for call in calls:
                assert all(map(torch.equal, call, expected[lane]))


def test_new_lengths_in_a_recorded_graph():
    """Lengths are data: a graph that was recorded with others serves these."""
    (q, k, v, _, starts), _ = packed("rows half")
    ones = torch.arange(34, dtype=torch.int32, device="cuda")
    static = starts.clone()
    attend((q, k, v, ones, static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend((q, k, v, ones, static))
    total = int(starts[-1])
    others = torch.linspace(0, total, 34, device="cuda").to(torch.int32)
    others[0], others[-1] = 0, total
    static.copy_(others)
    graph.replay()
    assert torch.equal(out, attend((q, k, v, ones, others))[0])
