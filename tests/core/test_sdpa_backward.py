"""Gradients of our forward by PyTorch's kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_routing import make, relative

from elsa_core.backends import eager, sdpa

GRADIENTS = {
    "plain": ((2, 4, 70, 16), (2, 4, 90, 16), None, False),
    "causal": ((2, 4, 70, 16), (2, 4, 90, 16), None, True),
    "grouped": ((2, 4, 70, 16), (2, 2, 90, 16), None, False),
    "bool mask": ((2, 4, 70, 16), (2, 4, 90, 16), (2, 1, 70, 90), False),
    "key mask": ((2, 4, 70, 16), (2, 4, 90, 16), (2, 1, 1, 90), False),
    "bias": ((2, 4, 70, 16), (2, 4, 90, 16), (1, 4, 70, 90), False),
    "bias of a query": ((2, 4, 70, 16), (2, 4, 90, 16), (1, 4, 70, 1), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", GRADIENTS)
def test_pytorchs_backward_takes_our_forward(case: str, dtype: torch.dtype) -> None:
    query_shape, key_shape, mask_shape, is_causal = GRADIENTS[case]
    q, k, v = (
        make(*s, dtype=dtype, seed=i) for i, s in enumerate((query_shape, key_shape, key_shape))
    )
    mask = None
    if mask_shape:
        mask = make(*mask_shape, dtype=dtype, seed=7)
        if "mask" in case:
            mask = mask > 0
        if case == "bool mask":
            mask[1, 0, 3] = False
    grad_out = make(*query_shape, dtype=dtype, seed=8)
    out, lse = eager.attention(q, k, v, mask, is_causal, 0.25)
    terms = (mask, out, lse, is_causal, 0.25, "strict", [True, True, True, False])
    found = sdpa.backward(grad_out, torch.zeros_like(lse), q, k, v, *terms)
    assert found is not None
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    reference, _ = eager.attention(*wide, wide_mask, is_causal, 0.25)
    exact = torch.autograd.grad(reference, wide, grad_out.double())
    band = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}[dtype]
    for grad, wanted, t in zip(found, exact, (q, k, v), strict=False):
        assert grad.stride() == torch.empty_like(t).stride() and grad.shape == t.shape
        assert relative(grad, wanted) < band
    assert found[3].shape == (0,)


def test_what_pytorchs_backward_leaves_to_the_formulas() -> None:
    q = make(1, 2, 5, 16)
    out, lse = eager.attention(q, q, q, None, False, 0.25)
    grad = torch.ones_like(out)
    end = (False, 0.25, "strict", [True] * 3 + [False])
    assert sdpa.backward(grad, lse * 0, q, q, q, None, out, lse, *end) is not None
    assert sdpa.backward(grad, lse, q, q, q, None, out, lse, *end) is None  # a gradient of lse
    assert sdpa.backward(grad, lse * 0, q, q, q, None, out, lse + 1e6, *end) is None  # its digits
    wide = torch.zeros(5, 5, dtype=torch.float64)[None, None]
    assert sdpa.backward(grad, lse * 0, q, q, q, wide, out, lse, *end) is None


@pytest.fixture
def cudnn(monkeypatch):
    """cuDNN's gradients by formulas on the CPU, as on Hopper; the strides of each call."""
    called = []

    def kernel(grad_out, query, key, value, out, lse, *terms, scale):
        called.append([t.stride() for t in (query, key, value, grad_out, out, lse)])
        *_, queries, keys, dropout, is_causal = terms
        assert (queries, keys, dropout) == (query.shape[2], key.shape[2], 0.0)
        end = (is_causal, scale, "strict", [True, True, True, False])
        rows = (out, lse.squeeze(-1))
        none = lse.new_empty(0)
        return eager.backward(grad_out, none, query, key, value, None, *rows, *end, is_shard=True)[
            :3
        ]

    fake = SimpleNamespace(default=kernel)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", fake)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sdpa, "_cudnn_takes", lambda *operands: True)
    monkeypatch.setattr(sdpa, "_LONG", 2 * 3 * 20 * 64 * 20)
    return called


def test_plans_of_cudnn_are_shared_with_nobody(cudnn) -> None:
    """PyTorch finds plans by the strides of query, key and value: where those are the same, so are
    the others', whatever a caller gives; and the query's are nobody else's."""
    q, grad, k, v = (make(2, 3, 20, 64, dtype=torch.float16, seed=s) for s in range(4))
    out, lse = eager.attention(q, k, v, None, True, 0.125)
    end = (True, 0.125, "strict", [True, True, True, False])
    wanted = eager.backward(grad, lse.new_empty(0), q, k, v, None, out, lse, *end, is_shard=True)
    layouts = {
        "heads outside": lambda t: t.clone(memory_format=torch.contiguous_format),
        "tokens outside": lambda t: t.transpose(1, 2).clone().transpose(1, 2),
        "of longer rows": lambda t: torch.cat((t, t), 2)[:, :, : t.shape[2]],
        "with a gap": lambda t: torch.stack((t, t), -1)[..., 0],
    }
    for first in layouts.values():
        for second in layouts.values():
            rows = (second(grad), first(q), k, v, None, second(out), second(lse))
            found = sdpa._on_cuda(*rows, True, 0.125, bias_needed=False)
            assert all(map(torch.equal, found[:3], wanted[:3]))
    assert len(cudnn) == 16 and all(strides == cudnn[0] for strides in cudnn)
    query, _, _, grad_out, _, of_lse = cudnn[0]
    assert query == (3 * (20 * 64 + 8), 20 * 64 + 8, 64, 1)
    assert grad_out == (3 * 20 * 64, 20 * 64, 64, 1) and of_lse == (60, 20, 1, 1)


def test_when_cudnn_computes_gradients(cudnn, monkeypatch) -> None:
    def serves(*shape: int, keys: int = 0, is_causal: bool = False) -> bool:
        q, k = (make(*shape[:2], n, shape[3]).half() for n in (shape[2], keys or shape[2]))
        out, lse = eager.attention(q, k, k, None, is_causal, 0.125)
        terms = {"is_causal": is_causal, "scale": 0.125}
        return sdpa._by_cudnn(out, q, k, k, out, lse, **terms) is not None

    assert serves(2, 3, 20, 64) and serves(2, 3, 20, 64, is_causal=True)
    assert serves(2, 3, 20, 64, keys=30) and serves(1, 1, 60, 128)
    assert not serves(2, 3, 20, 64, keys=30, is_causal=True)  # masks differ between kernels
    assert not serves(2, 3, 19, 64)  # flash takes no longer
    assert not serves(2, 3, 40, 32)  # likewise
    assert not serves(2, 3, 20, 136)  # there is no kernel
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not serves(2, 3, 20, 64)
