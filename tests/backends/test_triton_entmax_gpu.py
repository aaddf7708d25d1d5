"""The alpha-entmax kernels on a real GPU: against float64, by twice float32's error in PyTorch."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import elsa_core as elsa
from elsa_core.backends import eager_entmax

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# a rounding band of a few units in the last place
BAND = {torch.float32: 5e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def tensors(shape, dtype, seed=0):
    """Query, key, value and grad_out of (B, Hq, Hkv, Nq, Nk, D, Dv)."""
    b, h, hk, n, m, d, dv = shape
    g = torch.Generator("cuda").manual_seed(seed)
    sizes = ((b, h, n, d), (b, hk, m, d), (b, hk, m, dv), (b, h, n, dv))
    return [torch.randn(size, device="cuda", generator=g).to(dtype) for size in sizes]


def distance(x, reference):
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def agree(q, k, v, g, mask=None, *, alpha=1.5, causal=False, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    additive = mask is not None and mask.dtype != torch.bool
    if additive:
        mask = mask.detach().requires_grad_()
        leaves.append(mask)
    if isinstance(alpha, torch.Tensor):
        alpha = alpha.detach().requires_grad_()
        leaves.append(alpha)

    def call():
        # what the allocator hands out next is NaN: an element never written shows
        torch.full((1 << 24,), math.nan, device="cuda")
        out = elsa.entmax_attention(
            *leaves[:3], mask, alpha=alpha, is_causal=causal, scale=scale, enable_gqa=True,
            backend="triton",
        )  # fmt: skip
        return [out, *torch.autograd.grad(out, leaves, g)]

    found, again = call(), call()
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    head_alpha, number = (alpha, 0.0) if isinstance(alpha, torch.Tensor) else (None, alpha)
    if head_alpha is not None:
        head_alpha = head_alpha.detach().reshape((1,) * (4 - head_alpha.dim()) + head_alpha.shape)
    needs = [True, True, True, additive, head_alpha is not None]

    def by_pytorch(dtype):
        wide = [
            t.detach().to(dtype) if t is not None and t.is_floating_point() else t
            for t in (q, k, v, mask, head_alpha)
        ]
        out, *rest = eager_entmax.attention(*wide, number, causal, scale)
        grads = eager_entmax.backward(
            g.to(dtype), *wide, out, *rest, number, causal, scale, "strict", needs
        )
        return [out, *(t for t in grads if t.numel())]

    wanted, plain = by_pytorch(torch.float64), by_pytorch(torch.float32)
    for index, (x, exact, peer) in enumerate(zip(found, wanted, plain, strict=True)):
        error, limit = distance(x.reshape(exact.shape), exact), distance(peer, exact)
        assert torch.isfinite(x).all()
        assert error <= 2 * limit + BAND[q.dtype], f"{index}: {error:.2e} against {limit:.2e}"


@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("dtype", list(BAND))
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 3, 197, 197, 64, 64), (1, 4, 2, 333, 1025, 32, 24), (1, 2, 2, 70, 130, 48, 64),
        (1, 1, 1, 1, 300, 16, 16), (1, 1, 1, 2000, 2000, 64, 64),
    ],
)  # fmt: skip
def test_agrees_with_float64(shape, dtype, alpha):
    agree(*tensors(shape, dtype), alpha=alpha)


@pytest.mark.parametrize("dtype", list(BAND))
@pytest.mark.parametrize("alpha", [1.3, 1.5])
def test_causal(dtype, alpha):
    agree(*tensors((2, 2, 1, 300, 300, 64, 64), dtype), alpha=alpha, causal=True)
    agree(*tensors((1, 2, 2, 100, 300, 32, 32), dtype), alpha=alpha, causal=True)


@pytest.mark.parametrize("kind", ["bool", "additive", "keys"])
def test_masks_and_hidden_rows(kind):
    q, k, v, g = tensors((2, 2, 2, 150, 200, 32, 32), torch.float32)
    mask = torch.randn(1, 2, 150, 200, device="cuda")
    if kind == "bool":
        mask = mask > 0
        mask[:, :, 5] = False
    elif kind == "additive":
        mask[:, :, 5] = -math.inf
    else:
        mask = mask[:, :1, :1]
    agree(q, k, v, g, mask)


@pytest.mark.parametrize("shape", [(), (3, 1, 1), (2, 3, 1, 1)])
def test_alpha_of_heads(shape):
    g = torch.Generator("cuda").manual_seed(1)
    alpha = 1.2 + 0.7 * torch.rand(shape, device="cuda", generator=g)
    agree(*tensors((2, 3, 3, 150, 130, 32, 32), torch.float32), alpha=alpha)


def test_sparse_tiles_are_skipped_and_exact():
    q, k, v, g = tensors((1, 2, 2, 1000, 4000, 32, 32), torch.float32)
    agree(q * 6, k * 2, v, g)
    call = (q * 6, k * 2, v, None, None, 1.5, False, 0.2, "strict")
    _, _, tiles = torch.ops.elsa.entmax_attention(*call)
    assert 0 < tiles.float().mean() < 0.9


def test_strides_and_empty():
    packed = torch.randn(2, 200, 3, 4, 32, device="cuda")
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    agree(q, k, v, torch.randn(2, 4, 200, 32, device="cuda"))
    none = q[:, :, :0]
    assert elsa.entmax_attention(q, none, none, backend="triton").eq(0).all()
    assert elsa.entmax_attention(none, k, v, backend="triton").shape == none.shape


def test_large_scores():
    q, k, v, g = tensors((1, 2, 2, 100, 150, 32, 32), torch.float32)
    q, k = (q * 2).round(), (k * 2).round()
    q[:, 0, :5] *= 4096
    agree(q, k, v, g, scale=1.0)


def test_compiles_whole():
    q, k, v, _ = tensors((1, 2, 2, 100, 150, 32, 32), torch.float32)

    def call(q, k, v):
        return elsa.entmax_attention(q, k, v, backend="triton")

    torch.testing.assert_close(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v))


@pytest.mark.parametrize("dtype", list(BAND), ids=str)
def test_auto_takes_them(dtype):
    """Dense and packed, forward and gradients: the same bits; float64 stays with plain PyTorch."""
    q, k, v, g = tensors((1, 2, 2, 100, 150, 32, 32), dtype)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    packed = [t[0].transpose(0, 1) for t in leaves]
    ends = [torch.tensor([0, n // 2, n], dtype=torch.int32, device="cuda") for n in (100, 150)]
    for call, explain, given, grad in (
        (elsa.entmax_attention, elsa.explain_entmax_attention, leaves, g),
        (
            elsa.entmax_varlen_attention,
            elsa.explain_entmax_varlen_attention,
            (*packed, *ends),
            g[0].transpose(0, 1),
        ),
    ):
        assert explain(*given).backend == "triton"
        one, other = (call(*given, backend=backend) for backend in ("auto", "triton"))
        assert torch.equal(one, other)
        pairs = zip(*(torch.autograd.grad(x, leaves, grad) for x in (one, other)), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)
        wide = [t.double() if t.is_floating_point() else t for t in given]
        assert explain(*wide).backend == "eager" and call(*wide).dtype == torch.float64


def test_gradient_of_an_additive_mask_by_auto():
    """The forward by the kernels, the mask's gradient by plain PyTorch."""
    q, k, v, g = tensors((1, 2, 2, 100, 150, 32, 32), torch.float32)
    mask = torch.randn(2, 100, 150, device="cuda", requires_grad=True)
    found = [
        torch.autograd.grad(elsa.entmax_attention(q, k, v, mask, backend=backend), mask, g)[0]
        for backend in ("auto", "eager")
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
