"""Packed sequences on a real GPU: by their own kernel, and gradients of half precision by flash."""

from __future__ import annotations

import dataclasses
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
from elsa_core import routing  # noqa: E402
from elsa_core.backends import sdpa_varlen  # noqa: E402

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


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def attend(given, **options):
    return elsa.varlen_attention(*given, enable_gqa=True, return_lse=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_agrees_with_float64(backend, case, is_causal, dtype):
    given = operands(case, dtype)
    by_stream = "stream-K" in elsa.explain_varlen_attention(*given, enable_gqa=True).schedule
    assert by_stream == (case == "decode" and torch.cuda.get_device_capability() == (9, 0))
    wide = (*(t.double() for t in given[:3]), *given[3:])
    exact, exact_lse = attend(wide, is_causal=is_causal, backend="eager")
    peer, _ = attend(given, is_causal=is_causal, backend="eager")
    filled = torch.full_like(peer, torch.nan)  # what the next allocation of the size finds
    del filled
    out, lse = attend(given, is_causal=is_causal, backend=backend)
    assert out.dtype == dtype and out.isfinite().all()
    eps = torch.finfo(dtype).eps
    assert relative(out, exact) <= 2 * relative(peer, exact) + 4 * eps
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    live = ~lse.isneginf()
    assert (lse[live] - exact_lse[live]).abs().max() < (1e-5 if dtype == torch.float32 else 5e-3)
    assert torch.equal(out, attend(given, is_causal=is_causal, backend=backend)[0])


def lone_keys(case, given, weight):
    """What cancels in the gradients of queries and keys where a sequence has one key.

    There softmax is 1 whatever the score, and the score's gradient P (dP - sum(P dP)) is the
    difference of two equal numbers: exactly zero where both are one rounded number (eager), the
    rounding of either where they are summed apart (every kernel that keeps sum(out dout)).

    Returns:
        The rows of the queries and of the keys, and the term that is subtracted from itself there.
    """
    q, k, v = (t.double() for t in given[:3])
    group = q.shape[1] // k.shape[1]
    of_queries, of_keys = torch.zeros_like(q), torch.zeros_like(k)
    for a, n, b, m in zip(given[3], LENGTHS[case][0], given[4], LENGTHS[case][1], strict=False):
        if m == 1 and n:
            key, value = (t[b].repeat_interleave(group, 0) for t in (k, v))  # [H, D]
            share = (weight[a : a + n].double() * value).sum(-1, keepdim=True) * q.shape[2] ** -0.5
            of_queries[a : a + n] = share * key
            of_keys[b] = (share * q[a : a + n]).sum(0).unflatten(0, (-1, group)).sum(1)
    return [(t.ne(0).any(-1).any(-1), t) for t in (of_queries, of_keys)]


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("case", ["mixed", "crossed"])
def test_gradients(backend, case):
    """Rows of sequences with one key are judged by the rounding of what cancels there."""
    given = operands(case, torch.float32)
    weight = torch.randn_like(given[0])

    def grads(dtype, backend):
        q, k, v = (t.to(dtype).requires_grad_() for t in given[:3])
        out, _ = attend((q, k, v, *given[3:]), backend=backend)
        return torch.autograd.grad((out * weight.to(dtype)).sum(), (q, k, v))

    exact, peer = grads(torch.float64, "eager"), grads(torch.float32, "eager")
    found = [*grads(torch.float32, backend)]
    for index, (rows, term) in enumerate(lone_keys(case, given, weight)):
        assert rows.any() and exact[index][rows].abs().max() < 1e-12
        assert found[index][rows].double().norm() <= 5e-7 * term[rows].norm()
        found[index] = found[index].masked_fill(rows[:, None, None], 0.0)
    for one, other, reference in zip(found, peer, exact, strict=True):
        assert relative(one, reference) <= 2 * relative(other, reference) + 5e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", ["mixed", "crossed"])
def test_gradients_in_half_precision(case, is_causal, dtype, monkeypatch):
    """By PyTorch's flash kernel, but for causal limits between sequences of two lengths."""
    *operand, starts, others = operands(case, dtype)
    same = LENGTHS[case][0] == LENGTHS[case][1]
    given = (*operand, starts, starts if same else others)
    weight = torch.randn_like(given[0])
    by_flash = []

    def backward(*terms, run=sdpa_varlen.backward):
        by_flash.append(run(*terms) is not None)
        return run(*terms)

    offered = routing.implementation("varlen_attention", "sdpa")
    replaced = {"varlen_attention": dataclasses.replace(offered, backward=backward)}
    home = next(each for each in routing.table.BACKENDS if each.name == "sdpa")
    monkeypatch.setattr(
        routing.table, "BACKENDS",
        [dataclasses.replace(each, operators={**each.operators, **replaced}) if each is home
         else each for each in routing.table.BACKENDS],
    )  # fmt: skip
    monkeypatch.setattr(routing.choose, "BACKENDS", routing.table.BACKENDS)

    def grads(dtype, backend):
        q, k, v = (t.to(dtype).requires_grad_() for t in given[:3])
        out = elsa.varlen_attention(
            q, k, v, *given[3:], enable_gqa=True, is_causal=is_causal, backend=backend
        )
        return torch.autograd.grad((out * weight.to(dtype)).sum(), (q, k, v))

    exact, peer = grads(torch.float64, "eager"), grads(dtype, "eager")
    assert not by_flash
    found = grads(dtype, "auto")
    assert by_flash == [same or not is_causal]
    for one, other, reference in zip(found, peer, exact, strict=True):
        assert one.isfinite().all()
        assert relative(one, reference) <= 2 * relative(other, reference) + 5e-4


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
