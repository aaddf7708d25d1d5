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
# (B, Hq, Hkv, Nq, Nk, D), dtype, options
DENSE = {
    "vision": ((1, 12, 12, 197, 197, 64), F32, {}),
    "vision half": ((1, 3, 3, 1025, 1025, 64), F16, {}),
    "vision 577": ((4, 12, 12, 577, 577, 64), F32, {}),
    "two blocks, causal": ((2, 4, 2, 333, 333, 80), BF16, {"is_causal": True}),
    "lean": ((1, 3, 3, 300, 1025, 64), F32, {"precision": "lean"}),
    "turbo": ((1, 3, 3, 300, 1025, 64), F32, {"precision": "turbo"}),
    "row": ((4, 16, 16, 1, 20011, 128), F32, {}),
    "row half": ((2, 3, 3, 1, 65537, 64), F16, {}),
    "one row, every program": ((1, 1, 1, 1, 300001, 64), F32, {}),
    "heads that share keys": ((4, 32, 8, 1, 20011, 128), F16, {}),
    "heads that share keys, split": ((2, 8, 2, 1, 9001, 64), F32, {}),
    "few rows": ((2, 4, 4, 7, 9001, 64), F32, {}),
    "few rows half": ((2, 8, 2, 16, 9001, 128), F16, {}),
}
RAGGED = {
    "rows": ([1] * 33, [1 + 577 * i for i in range(33)], 8, 8, F32),
    "rows half": ([1] * 33, [1 + 577 * i for i in range(33)], 8, 8, F16),
    "heads that share keys": ([1] * 33, [1 + 577 * i for i in range(33)], 16, 4, F16),
    "mixed": ([256, 1, 0, 1000, 63, 577], [256, 1, 0, 1000, 63, 577], 6, 3, F32),
    "mixed half": ([7, 300, 0, 65, 128], [70, 1, 4, 0, 2049], 6, 3, BF16),
    "many": ([1, 2, 0, 3] * 100, [2, 1, 5, 0] * 100, 2, 2, F16),
}


def within(**knobs):
    from elsa_core.backends.triton.attention.schedules.stream import stream_k

    return stream_k(**knobs)


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def operands(shape, dtype, seed=0):
    torch.manual_seed(seed)
    b, h, hk, n, m, d = shape
    sizes = ((b, h, n, d), (b, hk, m, d), (b, hk, m, d))
    return [torch.randn(size, device="cuda").to(dtype) for size in sizes]


def attend(given, **options):
    options = {"backend": "triton", "enable_gqa": True, "return_lse": True, **options}
    return elsa.attention(*given, **options)


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


@pytest.mark.parametrize("programs", [None, 77, 1024])
@pytest.mark.parametrize("name", DENSE)
def test_agrees_with_float64(name, programs):
    shape, dtype, options = DENSE[name]
    given = operands(shape, dtype)
    wide = [t.double() for t in given]
    causal = options.get("is_causal", False)
    exact = attend(wide, is_causal=causal, backend="eager")
    peer = elsa.attention(*given, is_causal=causal, backend="eager", enable_gqa=True)
    with within(programs=programs, least=None if programs is None else 1):
        assert (
            "stream-K"
            in elsa.explain(*given, enable_gqa=True, backend="triton", **options).schedule
        )
        poison(peer, peer, peer)
        found = attend(given, **options)
        for _ in range(10):
            again = attend(given, **options)
            assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])
    if options.get("precision") == "turbo":
        assert relative(found[0], exact[0]) < 1e-3
    else:
        check(found, exact, peer, dtype)


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
    with within():
        poison(*peer, *peer)
        found = elsa.varlen_attention(*given, backend="triton", **options)
        for _ in range(10):
            again = elsa.varlen_attention(*given, backend="triton", **options)
            assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])
    check(found, exact, peer[0], dtype)


@pytest.mark.parametrize("times", [1e15, 1e-39, 0.0])
def test_extreme_inputs(times):
    """What a split cannot hold is folded with float32 FMA, share by share."""
    for shape in ((1, 2, 2, 197, 577, 64), (1, 2, 2, 1, 9001, 64)):
        q, k, v = operands(shape, F32)
        given = (q * times, k * times, v)
        exact = attend([t.double() for t in given], backend="eager")
        peer = elsa.attention(*given, backend="eager")
        with within(programs=50, least=1):
            out, _ = attend(given)
        assert out.isfinite().all()
        assert relative(out, exact[0]) <= 2 * relative(peer, exact[0]) + 1e-6


def test_tickets_are_left_at_zero():
    from elsa_core.backends.triton.shared import tickets

    given = operands((1, 2, 2, 1, 50001, 64), F32)
    with within():
        attend(given)
    torch.cuda.synchronize()
    assert tickets._of_streams and not any(t.any() for t in tickets._of_streams.values())


def test_graphs_and_streams_at_once():
    """Launches that may run at once share no tickets."""
    shape = (2, 8, 8, 1, 50001, 64)
    cases = [operands(shape, F16, seed) for seed in range(4)]
    with within(least=1):
        expected = [attend(given)[0].clone() for given in cases]
        graphs, outs = [], []
        for given in cases:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs.append(attend(given)[0])
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
                    eager.append(attend(given)[0])
            torch.cuda.synchronize()
            for found in (outs, eager):
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["vision", "vision half", "row", "heads that share keys"])
def test_random_delays_change_no_bit(name):
    """Two streams at once, each held up for a random time ahead of its inputs and of its calls: a
    launch that waits for the wrong one, or memory that two calls share, would show.
    """
    shape, dtype, options = DENSE[name]
    draw, sides = random.Random(0), [torch.cuda.Stream(), torch.cuda.Stream()]
    cases = [operands(shape, dtype, seed) for seed in range(2)]
    with within(least=1):
        expected = [[t.clone() for t in attend(given, **options)] for given in cases]
        torch.cuda.synchronize()
        for _ in range(30):
            found = [[], []]
            for lane in (0, 1, 0, 1):
                with torch.cuda.stream(sides[lane]):
                    torch.cuda._sleep(draw.randrange(400_000))
                    late = [t.clone() for t in cases[lane]]
                    torch.cuda._sleep(draw.randrange(100_000))
                    poison(*late)
                    found[lane].append(attend(late, **options))
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
    options = {"backend": "triton", "max_seqlen_q": 1, "max_seqlen_k": 40000}
    with within():
        elsa.varlen_attention(q, k, v, ones, static, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = elsa.varlen_attention(q, k, v, ones, static, **options)
        total = int(starts[-1])
        others = torch.linspace(0, total, 34, device="cuda").to(torch.int32)
        others[0], others[-1] = 0, total
        static.copy_(others)
        graph.replay()
        assert torch.equal(out, elsa.varlen_attention(q, k, v, ones, others, **options))
