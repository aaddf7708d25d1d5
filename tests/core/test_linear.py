"""`elsa_core.linear` and its operator without a GPU: PyTorch's arithmetic, all derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from elsa_core import linear as module
from elsa_core.linear import linear

OPERATOR = torch.ops.elsa.linear.default


def operands(bias=True, dtype=torch.float64, **options):
    torch.manual_seed(0)
    x, w = torch.randn(2, 5, 8, dtype=dtype, **options), torch.randn(12, 8, dtype=dtype, **options)
    return x, w, torch.randn(12, dtype=dtype, **options) if bias else None


@pytest.mark.parametrize("bias", [True, False])
def test_is_pytorchs(bias):
    given = operands(bias)
    assert torch.equal(linear(*given), functional.linear(*given))
    assert torch.equal(OPERATOR(*given), functional.linear(*given))


@pytest.mark.parametrize("bias", [True, False])
def test_operator(bias):
    torch.library.opcheck(OPERATOR, operands(bias, torch.float32, requires_grad=True))


@pytest.mark.parametrize("bias", [True, False])
def test_derivatives(bias):
    given = [t for t in operands(bias, requires_grad=True) if t is not None]

    def called(*tensors):
        return OPERATOR(*tensors) if bias else OPERATOR(*tensors, None)

    assert torch.autograd.gradcheck(called, given)
    assert torch.autograd.gradgradcheck(called, given)


def test_one_row():
    x, w, b = operands()
    assert torch.equal(OPERATOR(x[0, 0], w, b), functional.linear(x[0, 0], w, b))


def test_compiles_whole():
    given = operands(dtype=torch.float32)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), functional.linear(*given))


class Wrapped(torch.Tensor):
    """A weight as quantisers make them."""

    def __tensor_flatten__(self):
        return [], None


def test_a_wrapped_weight_and_mixed_dtypes_are_pytorchs():
    x, w, b = operands(dtype=torch.float32)
    assert module._fits(x, w, b)
    assert not module._fits(x, w.as_subclass(Wrapped), b)
    assert not module._fits(x, w.half(), None)
    assert not module._fits(x, w, b.half())


@pytest.mark.parametrize(
    ("dtype", "precision", "backend", "tf32", "served"),
    [
        (torch.float32, "strict", "auto", False, True),
        (torch.float32, "turbo", "triton", False, True),
        (torch.float32, "lean", "auto", False, True),
        (torch.float32, "ieee", "auto", False, False),
        (torch.float32, "strict", "eager", False, False),
        (torch.float32, "strict", "auto", True, False),
        (torch.float16, "strict", "auto", True, True),
        (torch.bfloat16, "strict", "auto", False, True),
        (torch.float64, "strict", "auto", False, False),
    ],
)
def test_whom_the_kernel_serves(monkeypatch, dtype, precision, backend, tf32, served):
    monkeypatch.setattr(module, "_has_kernel", lambda device: True)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        device = torch.device("cuda")
        assert module._serves(device, dtype, precision, backend) is served
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert not module._serves(device, dtype, precision, backend)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("dtype", "rows", "depth", "columns", "gains"),
    [
        (torch.float32, 1576, 768, 768, True),
        (torch.float32, 197, 192, 576, False),  # the host would be waited for
        (torch.float16, 25088, 96, 288, True),
        (torch.float16, 131072, 96, 288, False),
        (torch.float16, 25088, 128, 384, False),
        (torch.float16, 1024, 96, 288, False),
    ],
)
def test_where_it_gains(monkeypatch, dtype, rows, depth, columns, gains):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x = torch.empty(rows, depth, dtype=dtype, device="meta")
    assert module._gains(x, torch.empty(columns, depth, dtype=dtype, device="meta")) is gains


def test_a_recorded_graph_takes_small_ones_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert module._gains(torch.empty(197, 192, device="meta"), torch.empty(576, 192, device="meta"))
