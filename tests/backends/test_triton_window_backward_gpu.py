"""The window gradient kernels on a real GPU: against float64, by twice the error of autograd."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
from window_backward_interpreted import TERMS, arguments, distance, exact, peers
from window_cases import poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# a rounding band of a few units in the last place
BAND = {F32: 2.5e-7, F16: 3e-4, BF16: 2.5e-3}
NEEDS = (True, True, True, True)
# name: (batch, size, heads, head_dim, window, shift), options
SHAPES = {
    "swin stage 3": ((8, (1, 14, 14), 12, 32, (1, 7, 7), (0, 3, 3)), {"pad": True}),
    "swin padded": (
        (2, (1, 30, 33), 6, 32, (1, 7, 7), (0, 3, 3)), {"bias": "table", "pad": True}
    ),
}  # fmt: skip


def make(name, dtype, precision="strict", **more):
    shape, options = SHAPES[name]
    given, grad = arguments(shape, dtype, precision, options | more)
    terms = {name: getattr(given, name) for name in given._fields[:5]}
    return given._replace(
        **{name: t.cuda() for name, t in terms.items() if t is not None}
    ), grad.cuda()


def gradients(given, grad):
    from elsa_core.backends.triton.window.backward import window_attention_backward

    # what the allocator hands out next is NaN: an element never written shows
    poison()
    found = window_attention_backward(grad, *given, NEEDS)
    again = window_attention_backward(grad, *given, NEEDS)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    return found


def agree(given, grad):
    expected, theirs = exact(given, grad, NEEDS), peers(given, grad, NEEDS)
    band = 1e-3 if given.precision == "turbo" else BAND[given.qkv.dtype]
    for term, ours, reference, peer in zip(
        TERMS, gradients(given, grad), expected, theirs, strict=True
    ):
        assert ours.shape == reference.shape
        if ours.numel():
            error, limit = distance(ours, reference), 0.0
            if peer is not None:
                limit = distance(peer, reference)
            assert error <= 2 * limit + band, f"{term}: {error:.2e} against {limit:.2e}"


@pytest.mark.parametrize("name", ["swin padded", "swin stage 3"])
def test_what_a_split_does_not_hold(name):
    """Windows that fail the guard are computed by the second launch, and summed with the others."""
    agree(*make(name, F32, outlier=True))
    given, grad = make(name, F32)
    grad[0, :, :9] *= 1e-12
    agree(given, grad)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_training_step(name, half):
    """The gradients of all weights of a small model, patched, against float64 and the original's;
    the same bits from one step to the next."""
    timm = pytest.importorskip("timm")
    import elsa_core as elsa

    torch.manual_seed(0)
    model = timm.create_model(
        name, num_classes=10, img_size=128, depths=(2, 2), embed_dim=32, num_heads=(1, 2)
    ).cuda().eval()  # fmt: skip
    patched, whole = copy.deepcopy(model), copy.deepcopy(model).double()
    assert elsa.patch(patched, backend="triton").patched
    x, y = torch.randn(4, 3, 128, 128, device="cuda"), torch.tensor([1, 2, 3, 4], device="cuda")

    def step(m, x, dtype):
        m.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype):
            loss = torch.nn.functional.cross_entropy(m(x), y)
        loss.backward()
        return torch.cat([p.grad.double().flatten() for p in m.parameters() if p.grad is not None])

    reference = step(whole, x.double(), False)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        theirs = distance(step(model, x, half), reference)
        ours = step(patched, x, half)
        assert torch.equal(ours, step(patched, x, half))
    assert distance(ours, reference) <= 2 * theirs + (1e-3 if half else 2.5e-7)
