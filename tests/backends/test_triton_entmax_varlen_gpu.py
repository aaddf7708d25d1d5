"""The alpha-entmax kernels on packed sequences on a real GPU: all of them in one launch."""

from __future__ import annotations

import math
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import elsa_core as elsa
from elsa_core import ops
from elsa_core.backends.triton.attention import entmax_varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# a rounding band of a few units in the last place
BAND = {torch.float32: 5e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}
LENGTHS = {
    "mixed": ([256, 1, 0, 1000, 63, 577], [256, 1, 0, 1000, 63, 577]),
    "crossed": ([7, 300, 0, 65, 128], [70, 1, 4, 0, 1049]),
    "many short": ([1, 2, 0, 37] * 40, [2, 1, 5, 70] * 40),
}
OVERLOAD = ops.ENTMAX_VARLEN_ATTENTION.overload


def bounds(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype, device="cuda")


def operands(case, dtype, heads=4, kv_heads=2, dim=64, seed=0, of_keys=torch.int32):
    g = torch.Generator("cuda").manual_seed(seed)
    queries, keys = LENGTHS[case]
    shapes = ((sum(queries), heads, dim), (sum(keys), kv_heads, dim), (sum(keys), kv_heads, dim))
    q, k, v = (torch.randn(s, device="cuda", generator=g).to(dtype) for s in shapes)
    return q, k, v, bounds(queries), bounds(keys, of_keys)


def spoil():
    """What the allocator hands out next is NaN: an element that is never written shows."""
    blocks = [torch.full((1 << n,), math.nan, device="cuda") for n in range(8, 25)]
    del blocks


def distance(x, reference):
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def results(given, weight, dtype, backend, alpha=1.5, longest=(None, None), **terms):
    """The output and the gradients of query, key, value and, where it is a tensor, alpha."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in given[:3]]
    if isinstance(alpha, torch.Tensor):
        alpha = alpha.detach().double() if dtype == torch.float64 else alpha.detach()
        leaves.append(alpha.requires_grad_())
    out = elsa.entmax_varlen_attention(
        *leaves[:3], *given[3:], *longest, alpha=alpha, enable_gqa=True, backend=backend, **terms
    )
    return [out, *torch.autograd.grad(out, leaves, weight.to(dtype))]


def agree(given, dtype, **terms):
    """Against float64, by twice the error of plain PyTorch in the same dtype; twice the same bits.

    Plain PyTorch computes half precision in float32.
    """
    weight = torch.randn(
        (*given[0].shape[:2], given[2].shape[2]), device="cuda",
        generator=torch.Generator("cuda").manual_seed(5),
    ).to(dtype)  # fmt: skip
    exact = results(given, weight, torch.float64, "eager", **terms)
    peer = results(given, weight, dtype, "eager", **terms)
    found = []
    for _ in range(2):
        spoil()
        found.append(results(given, weight, dtype, "triton", **terms))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    for index, (x, reference, other) in enumerate(zip(found[0], exact, peer, strict=True)):
        error, limit = distance(x, reference), distance(other, reference)
        assert x.isfinite().all()
        assert error <= 2 * limit + BAND[dtype], f"{index}: {error:.2e} against {limit:.2e}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_heads(dtype):
    agree(operands("mixed", dtype, heads=2, kv_heads=1, dim=128), dtype, is_causal=True)


def test_large_scores_and_sparse_tiles():
    q, k, v, *ends = operands("mixed", torch.float32, dim=32)
    agree((q * 6, k * 2, v, *ends), torch.float32)
    q, k = (q * 2).round() / 2, (k * 2).round()
    q[:, 0] *= 4096
    agree((q, k, v, *ends), torch.float32, scale=0.5)


def test_nothing_waits_for_the_device():
    given = operands("mixed", torch.float32)
    weight = torch.randn_like(given[0])
    alpha = torch.full((4, 1, 1), 1.4, device="cuda")
    for longest in ((None, None), (1000, 1000)):
        results(given, weight, torch.float32, "triton", alpha, longest)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            results(given, weight, torch.float32, "triton", alpha, longest)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_launches_do_not_grow_with_sequences(monkeypatch):
    """One forward, two lists, two gradients and a sum for alpha."""
    given = operands("many short", torch.float16)
    weight = torch.randn_like(given[0])
    alpha = torch.full((4, 1, 1), 1.4, device="cuda")
    count = []
    plain = entmax_varlen.Launch.__call__

    def call(self, *pointers):
        count.append(self.kernel.__name__)
        plain(self, *pointers)

    monkeypatch.setattr(entmax_varlen.Launch, "__call__", call)
    results(given, weight, torch.float16, "triton", alpha)
    assert count == [
        "forward", "list_columns", "list_tiles", "query_gradient", "key_gradient",
        "sum_of_sequences",
    ]  # fmt: skip


def test_new_lengths_in_a_recorded_graph():
    """Forward and gradients: a graph that was recorded with other lengths serves these."""
    q, k, v, starts, _ = operands("mixed", torch.float16, kv_heads=4)
    weight, static = torch.randn_like(q), starts.clone()
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def step(ends):
        out = elsa.entmax_varlen_attention(
            *leaves, ends, max_seqlen_q=1000, is_causal=True, backend="triton"
        )
        return [out, *torch.autograd.grad(out, leaves, weight)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(static)
    others = bounds([1000, 0, 600, 200, 1, 96])
    static.copy_(others)
    graph.replay()
    for x, y in zip(found, step(others), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("of_heads", [False, True])
def test_opcheck(of_heads):
    q, k, v, *ends = operands("crossed", torch.float32, dim=16)
    alpha = torch.full((5, 4, 1, 1), 1.4, device="cuda", requires_grad=True) if of_heads else None
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(
        OVERLOAD, (*leaves, *ends, alpha, 300, 1049, 1.5, True, 0.25, "strict")
    )  # fmt: skip


@pytest.mark.parametrize("before", [3, 64, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_of_no_sequence_change_nothing(causal, before):
    """Before the first sequence and behind the last; all that is of them is NaN."""
    q, k, v, ends, _ = operands("mixed", torch.float32, kv_heads=4)
    tensors = q, k, v, torch.randn_like(q)
    padded = []
    for t in tensors:
        padded.append(t.new_full((t.shape[0] + 300, *t.shape[1:]), math.nan))
        padded[-1][before : before + t.shape[0]] = t
    alpha = 1.2 + 0.4 * torch.rand((6, 4, 1, 1), device="cuda")
    found = []
    for *parts, weight, starts in ((*tensors, ends), (*padded, ends + before)):
        spoil()
        given = (*parts, starts, starts)
        found.append(results(given, weight, torch.float32, "triton", alpha, is_causal=causal))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y if y.shape == x.shape else y[before : before + x.shape[0]])


def test_nested_tensors():
    parts = [torch.randn(n, 3, 4, 32, device="cuda") for n in (5, 70, 300)]
    q, k, v = (
        torch.nested.nested_tensor([p[:, i] for p in parts], layout=torch.jagged).transpose(1, 2)
        for i in range(3)
    )
    out = elsa.entmax_attention(q, k, v, backend="triton")
    for one, p in zip(out.unbind(), parts, strict=True):
        alone = [p[:, i].transpose(0, 1)[None] for i in range(3)]
        other = elsa.entmax_attention(*alone, backend="triton")[0]
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
