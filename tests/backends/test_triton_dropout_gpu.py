"""The kernels with dropout on a real GPU: the reference's keep mask, and against float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import elsa_core as elsa
from elsa_core.backends import eager, philox
from elsa_core.backends.philox import Dropout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# a rounding band of a few units in the last place
BAND = {torch.float32: 2.5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
P = 0.2


def seed_of(number):
    torch.manual_seed(number)
    seed = philox.draw(torch.device("cuda"))
    torch.manual_seed(number)
    return seed


@pytest.mark.parametrize("dtype", list(BAND))
@pytest.mark.parametrize(("n", "m"), [(197, 197), (300, 333), (65, 1025), (1, 77)])
def test_kept_weights_are_the_references(dtype, n, m):
    seed = seed_of(3)
    q, k = (torch.zeros(2, 3, size, 64, device="cuda", dtype=dtype) for size in (n, m))
    kept = philox.factors(Dropout(P, seed), 2, 3, slice(0, n), slice(0, m), torch.float32) > 0
    on_cpu = philox.factors(Dropout(P, seed.cpu()), 2, 3, slice(0, n), slice(0, m), torch.float32)
    assert torch.equal(kept.cpu(), on_cpu > 0)
    width = min(m, 128)
    v = torch.zeros(2, 3, m, width, device="cuda", dtype=dtype)
    v[:, :, range(width), range(width)] = 1.0
    out = elsa.attention(q, k, v, dropout_p=P, backend="triton")
    assert torch.equal(out > 0, kept[..., :width])


def tensors(shape, dtype):
    b, h, hk, n, m, d, dv = shape
    g = torch.Generator("cuda").manual_seed(0)
    sizes = ((b, h, n, d), (b, hk, m, d), (b, hk, m, dv), (b, h, n, dv))
    return [torch.randn(size, device="cuda", generator=g).to(dtype) for size in sizes]


def reference(dtype, operands, mask, causal, seed, grad_out):
    q, k, v = (t.to(dtype) for t in operands)
    mask = None if mask is None else mask if mask.dtype == torch.bool else mask.to(dtype)
    drawn, scale = Dropout(P, seed), q.shape[-1] ** -0.5
    out, lse = eager.attention(q, k, v, mask, causal, scale, dropout=drawn)
    needs = (True, True, True, mask is not None and mask.dtype != torch.bool)
    terms = (grad_out.to(dtype), torch.zeros_like(lse), q, k, v, mask, out, lse, causal, scale)
    return out, *eager.backward(*terms, "strict", needs, dropout=drawn)


def agree(shape, dtype, mask=None, causal=False):
    *operands, grad_out = tensors(shape, dtype)
    found = []
    for _ in range(2):
        seed = seed_of(5)
        leaves = [t.clone().requires_grad_() for t in operands]
        bias = mask
        if mask is not None and mask.dtype != torch.bool:
            bias = mask.clone().requires_grad_()
            leaves.append(bias)
        # what the allocator hands out next is NaN: an element never written shows
        torch.full((1 << 24,), float("nan"), device="cuda")
        out = elsa.attention(*leaves[:3], bias, P, causal, enable_gqa=True, backend="triton")
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad_out)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    exact = reference(torch.float64, operands, mask, causal, seed, grad_out)
    peer = reference(dtype, operands, mask, causal, seed, grad_out)
    for ours, other, oracle in zip(found[0], peer, exact, strict=False):
        error, limit = (
            ((x.double() - oracle).norm() / oracle.norm()).item() for x in (ours, other)
        )
        assert error <= 2 * limit + BAND[dtype], f"{error:.2e} against {limit:.2e}"


@pytest.mark.parametrize("dtype", list(BAND))
@pytest.mark.parametrize(
    "shape",
    [(2, 2, 2, 197, 197, 64, 64), (1, 2, 2, 1025, 1025, 64, 64), (2, 4, 2, 100, 333, 80, 48),
     (1, 1, 1, 130, 70, 256, 256), (2, 4, 4, 1, 77, 32, 32)],
)  # fmt: skip
def test_against_float64(dtype, shape):
    agree(shape, dtype)


@pytest.mark.parametrize("dtype", list(BAND))
def test_causal_and_masks(dtype):
    shape = (2, 4, 4, 300, 300, 64, 64)
    agree(shape, dtype, causal=True)
    draw = torch.Generator("cuda").manual_seed(1)
    agree(shape, dtype, torch.rand(1, 4, 300, 300, device="cuda", generator=draw) > 0.3)
    agree(shape, dtype, torch.randn(1, 4, 300, 300, device="cuda", generator=draw).to(dtype))


def test_a_captured_step_draws_anew_in_each_replay():
    x = torch.randn(2, 4, 197, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    for _ in range(2):
        elsa.attention(x, x, x, dropout_p=P, backend="triton").sum().backward()
    torch.cuda.synchronize()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = elsa.attention(x, x, x, dropout_p=P, backend="triton")
        out.sum().backward()
    outs = []
    for _ in range(2):
        graph.replay()
        outs.append((out.detach().clone(), x.grad.clone()))
    assert not torch.equal(outs[0][0], outs[1][0]) and not torch.equal(outs[0][1], outs[1][1])


def test_auto_is_pytorch():
    """Until the kernels are measured; then equal seeds drop what the original drops."""
    x = torch.randn(2, 4, 197, 64, device="cuda", dtype=torch.float16)
    assert elsa.explain(x, x, x, dropout_p=P).backend == "sdpa"
    torch.manual_seed(0)
    out = elsa.attention(x, x, x, dropout_p=P)
    torch.manual_seed(0)
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=P))
