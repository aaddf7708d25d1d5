"""The kernels with dropout on a real GPU: the reference's keep mask, and against float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import elsa_core as elsa
from elsa_core.backends import eager
from elsa_core.backends.philox import Dropout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# a rounding band of a few units in the last place
P = 0.2


def reference(dtype, operands, mask, causal, seed, grad_out):
    q, k, v = (t.to(dtype) for t in operands)
    mask = None if mask is None else mask if mask.dtype == torch.bool else mask.to(dtype)
    drawn, scale = Dropout(P, seed), q.shape[-1] ** -0.5
    out, lse = eager.attention(q, k, v, mask, causal, scale, dropout=drawn)
    needs = (True, True, True, mask is not None and mask.dtype != torch.bool)
    terms = (grad_out.to(dtype), torch.zeros_like(lse), q, k, v, mask, out, lse, causal, scale)
    return out, *eager.backward(*terms, "strict", needs, dropout=drawn)


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
