"""A patched site trains by its original forward where the shipped table finds that faster."""

import copy

import pytest
import torch
from timm.layers.attention import Attention
from timm.models.swin_transformer import SwinTransformerBlock
from torch import nn
from torch.utils.checkpoint import checkpoint

from elsa_core.dispatch import measured
from elsa_core.patching.adapters.common import trains_by_pytorch
from elsa_core.patching.rewrite import patch


def block(side: int = 8, **options: float) -> nn.Module:
    made = SwinTransformerBlock(32, (side, side), 2, window_size=4, shift_size=2, **options)
    return nn.Sequential(made)


def test_the_table_names_devices() -> None:
    devices = ("cpu", "cuda", "mps")
    found = [measured.originals("window_attention", each) for each in devices]
    assert found == [False, True, False]
    assert not any(measured.originals("attention", each) for each in devices)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["input", "weights", "nothing", "by name"])
def test_windows_train_by_the_original(wanted: str) -> None:
    """In float64, whose gradients no kernel has; a backend asked for by name serves training."""
    original = block().eval().cuda().double()
    model = copy.deepcopy(original)
    patch(model, backend="eager" if wanted == "by name" else "auto")
    x = torch.randn(1, 8, 8, 32).cuda().double().requires_grad_(wanted == "input")
    for each in (original, model):
        each.requires_grad_(wanted in ("weights", "by name"))
    out, expected = model(x), original(x)
    torch.testing.assert_close(out, expected)
    if wanted in ("input", "weights"):
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "left"), [(10, True), (4000, False)])
def test_small_attention_trains_by_the_original(tokens: int, left: bool) -> None:
    site = Attention(64, 4).cuda()
    site.elsa_backend, site.elsa_precision = "auto", "strict"
    x = torch.randn(1, tokens, 64).cuda()
    assert trains_by_pytorch(site, x, site.qkv) is left
    assert trains_by_pytorch(site, x.half(), site.qkv)  # half precision is PyTorch's at any size
    assert not trains_by_pytorch(site, x.cpu(), site.qkv)
    with torch.no_grad():
        assert not trains_by_pytorch(site, x, site.qkv)
    site.elsa_backend = "triton"
    assert not trains_by_pytorch(site, x, site.qkv)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_meets_the_same_dropout(reentrant: bool) -> None:
    """A reentrant checkpoint runs without gradients first, and once more for them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = block(10, proj_drop=0.3).train().to(device)
    patch(model)
    x = torch.randn(1, 10, 10, 32, device=device, requires_grad=True)
    gradients = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        out = call(x)
        x.grad = None
        out.sum().backward()
        assert x.grad is not None
        gradients.append((out.detach(), x.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Quantised(nn.Module):
    """As torch's quantised layers, whose weight is a method."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def weight(self) -> torch.Tensor:
        return self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_projection_without_a_weight_tensor() -> None:
    model = block().eval()
    model[0].attn.qkv = Quantised(model[0].attn.qkv)
    x = torch.randn(1, 8, 8, 32)
    expected = model(x)
    assert patch(model).patched
    torch.testing.assert_close(model(x), expected)
