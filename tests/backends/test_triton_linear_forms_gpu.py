"""Gated units and half-precision products on a real NVIDIA GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from elsa_core import dispatch
from elsa_core.ops.linear.record import plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def distance(out, reference):
    return ((out.double() - reference).norm() / reference.norm()).item()


def operands(rows, depth, columns, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(rows, depth, device="cuda").to(dtype)
    w = (torch.randn(columns, depth, device="cuda") * depth**-0.5).to(dtype)
    return x, w, torch.randn(columns, device="cuda").to(dtype)


def poisoned(rows, columns, dtype=torch.float32):
    """What was freed is what the next allocation of the size finds."""
    torch.full((rows, columns), float("nan"), dtype=dtype).cuda()


def both(x, w, b, value, value_b, gate=functional.silu):
    return gate(functional.linear(x, w, b)) * functional.linear(x, value, value_b)


GATED = [(1370, 1536, 512), (2056, 768, 2048), (65, 72, 36)]


@pytest.mark.parametrize("shape", GATED)
@pytest.mark.parametrize("frozen", [False, True])
def test_gated(shape, frozen):
    from elsa_core.backends.triton.linear import gated, planner

    rows, depth, columns = shape
    x, packed, bias = operands(rows, depth, 2 * columns)
    (w, v), (b, c) = packed.chunk(2), bias.chunk(2)
    kept = ()
    if frozen:
        halves, powers = planner.split_weight(packed)
        (h, i), (p, q) = halves.chunk(2, 1), powers.chunk(2)
        kept = (h, p, i, q)
    given = (x, w, b, v, c)
    poisoned(rows, columns)
    out, again = (gated.gated_linear(*given, "silu", "strict", *kept) for _ in range(2))
    assert out is not None and torch.equal(out, again)
    exact = both(*(t.double() for t in given))
    assert distance(out, exact) <= 2 * distance(both(*given), exact) + 2**-26


@pytest.mark.parametrize("hostile", ["small", "row", "channel", "zeros", "inf", "nan"])
def test_gated_of_hostile_data(hostile):
    from elsa_core.backends.triton.linear import gated

    x, w, _ = operands(300, 96, 288)
    v = w.flip(0).contiguous()
    if hostile == "small":
        x *= 1e-15
    elif hostile == "row":
        x[7] = 1e-30
    elif hostile == "channel":
        x[:, 3] *= 1e12
        w[:, 3] /= 1e12
        v[:, 3] /= 1e12
    elif hostile == "zeros":
        x[5:80] = 0.0
    else:
        x[100, 5] = float(hostile)
    out = gated.gated_linear(x, w, None, v, None)
    peer = both(x, w, None, v, None)
    exact = both(x.double(), w.double(), None, v.double(), None)
    assert torch.equal(torch.isnan(out), torch.isnan(peer))
    there = torch.isfinite(exact) & torch.isfinite(peer)
    bound = 2 * distance(peer[there], exact[there]) + 2**-26
    assert distance(out[there], exact[there]) <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1576, 48, 192), (25088, 96, 384), (65, 72, 136)])
@pytest.mark.parametrize("terms", ["gelu", "all"])
def test_half(dtype, shape, terms):
    from elsa_core.backends.triton.linear import gemm

    rows, _, columns = shape
    x, w, b = operands(*shape, dtype)
    residual = scale = None
    if terms == "all":
        residual = torch.randn(rows, columns).cuda().to(dtype)
        scale = torch.rand(columns).cuda().to(dtype)
    activation = "gelu"
    poisoned(rows, columns, dtype)
    out = gemm.linear(x, w, b, activation, residual, scale)
    assert torch.equal(out, gemm.linear(x, w, b, activation, residual, scale))
    wide = [None if t is None else t.double() for t in (x, w, b, residual, scale)]
    exact = plain(*wide[:3], activation, *wide[3:])
    peer = plain(x, w, b, activation, residual, scale)
    assert out.dtype == dtype and distance(out, exact) <= 1.02 * distance(peer, exact)


@pytest.fixture
def never_small(monkeypatch):
    """Eager calls take the kernels whatever their size."""
    from elsa_core.dispatch import measured

    for module in (dispatch, measured):
        monkeypatch.setattr(module, "eager_least", lambda *_: 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eva02_tiny_patch14_224", {}),
        ("eva02_base_patch14_224", {"depth": 2}),
        ("vit_giant_patch14_dinov2", {"img_size": 224, "depth": 2}),
    ],
)
def test_models_with_gates(name, options, never_small, monkeypatch):
    timm = pytest.importorskip("timm")
    import elsa_core as elsa
    from elsa_core.backends.triton.linear import gated

    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval().cuda()
    x = torch.randn(8, 3, 224, 224, device="cuda")
    seen = []
    inner = gated.gated_linear
    monkeypatch.setattr(gated, "gated_linear", lambda *a: seen.append(inner(*a)) or seen[-1])
    with torch.inference_mode():
        peer = model(x)
        wanted = model.double()(x.double())
        model.float()
        elsa.patch(model, scope="model")
        with dispatch.unmeasured(dispatch.GATED):
            out = model(x)
            assert len(seen) == len(model.blocks) and all(t is not None for t in seen)
            elsa.freeze(model)
            frozen = model(x)
    bound = 2 * distance(peer, wanted) + 2**-22
    assert max(distance(t, wanted) for t in (out, frozen)) <= bound
