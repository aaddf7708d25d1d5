"""Who computes a linear layer: what the table gives PyTorch, and oneDNN where MKL lags."""

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from elsa_core.backends import onednn as onednn_backend
from elsa_core.ops.linear.api import linear

OPERATOR = torch.ops.elsa.linear.default


def operands(bias=True, dtype=torch.float64, **options):
    torch.manual_seed(0)
    x, w = torch.randn(2, 5, 8, dtype=dtype, **options), torch.randn(12, 8, dtype=dtype, **options)
    return x, w, torch.randn(12, dtype=dtype, **options) if bias else None


def test_autocast_leaves_the_operator_alone():
    given = operands(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert OPERATOR(*given).dtype == torch.float32


@pytest.fixture
def onednn(monkeypatch):
    """A processor for which MKL lags, where PyTorch has oneDNN."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch has no oneDNN here")
    monkeypatch.setattr(onednn_backend, "_mkl_lags", lambda: True)


def large(**options):
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 128, 192), torch.randn(192, 192, **options), torch.randn(192)
    assert x.numel() * w.shape[0] >= onednn_backend.LEAST_ONEDNN
    return x, w, b


@pytest.mark.parametrize("depth", [192, 200, 384, 768, 1152])
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_computes_the_same(onednn, bias, depth):
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 128, depth), torch.randn(256, depth), torch.randn(256)
    b = b if bias else None
    assert onednn_backend._suits_onednn(x, w, b)
    exact = functional.linear(x.double(), w.double(), None if b is None else b.double())
    ours, theirs = ((f(x, w, b) - exact).norm() for f in (linear, functional.linear))
    assert ours <= 1.1 * theirs
    if bias:
        spread = b.repeat_interleave(2)[::2]
        assert torch.equal(linear(x, w, spread), functional.linear(x, w, spread))
        assert torch.equal(linear(x, w, b, precision="ieee"), functional.linear(x, w, b))
    x[1, 5, 7], w[3, 4] = float("inf"), float("nan")
    out, peer = linear(x, w, b), functional.linear(x, w, b)
    assert torch.equal(out.isnan(), peer.isnan()) and torch.equal(out.isinf(), peer.isinf())


def test_whom_onednn_serves(onednn):
    x, w, b = large()
    suits = onednn_backend._suits_onednn
    assert not suits(x[:, :10], w, b)  # small, and not dense
    assert not suits(x.double(), w.double(), b.double()) and not suits(x, w.double(), b)
    assert not suits(x, w, b[:1]) and not suits(x, w, torch.zeros(384)[::2])
    assert not suits(x, w, torch.zeros(1).expand(192)) and not suits(x, w, b.to("meta"))
    assert not suits(x, w.to_mkldnn(), b) and not suits(x, w[0], b)
    wide = torch.randn(1024, 768)
    assert suits(torch.randn(128, 768), wide, None)
    assert not suits(torch.randn(127, 768), wide, None)  # its parts would have to be copied
    assert not suits(x, w[:, :100], b) and not suits(x, w.t(), b)
    assert suits(x, w.clone().requires_grad_(), b)
    assert suits(x, torch.nn.Parameter(w, requires_grad=False), b)
    with torch.no_grad():
        assert suits(x, torch.nn.Parameter(w), b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not suits(x, w, b)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not suits(x, w, b)
    torch.set_float32_matmul_precision("medium")
    try:
        assert not suits(x, w, b)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert suits(x, w, b)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,), (2,)])
@pytest.mark.parametrize(("depth", "columns"), [(192, 200), (384, 576), (768, 192)])
def test_gradients_by_onednn(onednn, depth, columns, wanted):
    """As exact as those of PyTorch's MKL."""
    torch.manual_seed(0)
    given = torch.randn(2, 130, depth), torch.randn(columns, depth), torch.randn(columns)
    # as a product with what follows in other order hands it on
    slope = torch.randn(130, 2, columns).transpose(0, 1)

    def gradients(call, dtype=torch.float32):
        leaves = [t.to(dtype).requires_grad_(i in wanted) for i, t in enumerate(given)]
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, [leaves[i] for i in wanted], slope.to(dtype))]

    exact = gradients(functional.linear, torch.float64)
    found = gradients(linear)
    assert type(found[0].grad_fn).__name__ == "_TrainedBackward"
    for mine, peer, reference in zip(found, gradients(functional.linear), exact, strict=True):
        assert mine.shape == peer.shape
        assert (mine - reference).norm() <= 1.1 * (peer - reference).norm() + 1e-12


def test_second_derivatives_and_batches_of_gradients_of_onednn(onednn):
    x, w, b = (t.requires_grad_() for t in large())

    def twice(call):
        first = torch.autograd.grad(call(x, w, b).square().sum(), (x, w, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first) * 1e-6, (x, w, b))

    for mine, peer in zip(twice(linear), twice(functional.linear), strict=True):
        torch.testing.assert_close(mine, peer, rtol=1e-4, atol=1e-4 * peer.abs().max().item())
    slopes = torch.randn(3, 2, 128, 192)
    for each in zip(
        *(torch.autograd.grad(f(x, w, b), (x, w), slopes, is_grads_batched=True)
          for f in (linear, functional.linear)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(*each, rtol=1e-4, atol=1e-3)
    tangent = torch.func.jvp(lambda t: linear(t, w.detach(), b.detach()), (x.detach(),), (x,))[1]
    torch.testing.assert_close(tangent, x @ w.t(), rtol=1e-4, atol=1e-3)


def test_a_recorded_program_is_not_onednns(onednn):
    x, w, b = large()

    class Layer(torch.nn.Module):
        def forward(self, x):
            return linear(x, w.detach(), b)

    program = torch.export.export(Layer(), (x,))
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert targets and not any("mkldnn" in target for target in targets)


@pytest.mark.parametrize(
    ("vendor", "capability", "lags"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
    ],
)
def test_where_mkl_lags(monkeypatch, pretended, vendor, capability, lags):
    file = pretended(vendor, capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert onednn_backend._mkl_lags.__wrapped__() is lags
    file.unlink()
    assert not onednn_backend._mkl_lags.__wrapped__()


def test_a_proof_judges_what_users_run(onednn):
    """A site is measured under a dispatch mode, and computes there what it does without."""
    from elsa_core.proof.capture import OperatorCapture

    x, w, b = large()
    plain = linear(x, w, b)
    with OperatorCapture():
        assert onednn_backend._suits_onednn(x, w, b) and torch.equal(linear(x, w, b), plain)
        with FlopCounterMode(display=False) as counter:  # another mode: it sees PyTorch's own
            linear(x, w, b)
        assert counter.get_total_flops() == 2 * x.numel() * w.shape[0]
    with FlopCounterMode(display=False) as counter:
        linear(x, w, b)
    assert counter.get_total_flops() == 2 * x.numel() * w.shape[0]
