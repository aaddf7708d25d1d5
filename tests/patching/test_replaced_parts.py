"""Modules that take the place of a patched site's parts, before or after patching."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import elsa_core as elsa

timm = pytest.importorskip("timm")


class Triple(nn.Module):
    def forward(self, x):
        return 3 * x


class LowRank(nn.Module):
    """A linear layer with a low-rank addition, without a `weight` of its own."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Twice(nn.Module):
    """Another attention in an attention's place."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, *given, **named):
        return 2 * self.inner(*given, **named)


def replaces(name: str, make: Callable[[nn.Module], nn.Module], beside: str):
    def change(model: nn.Module) -> None:
        for module in list(model.modules()):
            if hasattr(module, name) and hasattr(module, beside):
                setattr(module, name, make(getattr(module, name)))

    return change


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("attn_type", ["eva", "rope"])
def test_hooks_on_the_weights_of_eva(attn_type, after):
    """Of the eager branch: they see and change the attention weights."""
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    eva = pytest.importorskip("timm.models.eva")
    model = eva.Eva(**options, num_classes=3, use_rot_pos_emb=True, attn_type=attn_type).eval()
    attn = model.blocks[0].attn
    attn.fused_attn = False
    seen = []

    def halved(module, given, weights):
        seen.append(weights.shape)
        return weights * 0.5

    if after:
        elsa.patch(model, scope="attention")
    attn.attn_drop.register_forward_hook(halved)
    x = torch.randn(2, 3, 16, 16)
    elsa.patch(model, scope="attention")
    with torch.no_grad():
        found = model(x)
        assert len(seen) == 1
        elsa.unpatch(model)
        assert torch.equal(found, model(x)) and len(seen) == 2


CHANGES = {
    "activation": replaces("act", lambda _: nn.Tanh(), "fc2"),
    "first layer": replaces("fc1", LowRank, "fc2"),
    "gates": replaces("fc1_g", LowRank, "fc2"),
    "softmax": replaces("softmax", lambda _: nn.Sigmoid(), "attn_drop"),
    "dropout": replaces("attn_drop", lambda _: Triple(), "softmax"),
    "attention": replaces("attn", Twice, "norm1"),
}
VIT = ("vit_tiny_patch16_224", {"depth": 2})
GATED = ("vit_tiny_patch16_224", {"depth": 2, "mlp_layer": timm.layers.SwiGLU})
WINDOWS = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
SWIN = ("swin_tiny_patch4_window7_224", WINDOWS)
SWIN_V2 = ("swinv2_tiny_window8_256", WINDOWS)
CASES = [
    (VIT, "activation"), (VIT, "first layer"), (GATED, "activation"), (GATED, "gates"),
    (SWIN, "activation"), (SWIN, "softmax"), (SWIN, "dropout"), (SWIN, "attention"),
    (SWIN_V2, "softmax"), (SWIN_V2, "dropout"),
]  # fmt: skip


@pytest.mark.parametrize("first", ["patched", "replaced"])
@pytest.mark.parametrize(("model", "part"), CASES)
def test_what_takes_a_parts_place_computes(model, part, first):
    """What no operator stands for is called as the original calls it."""
    name, options = model
    torch.manual_seed(0)
    original = timm.create_model(name, img_size=64, **options).eval()
    with torch.no_grad():
        for weight in original.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # norms of SwinV2 begin at zero
        before = original(torch.ones(1, 3, 64, 64))
    patched = copy.deepcopy(original)
    if first == "replaced":
        CHANGES[part](patched)
    elsa.patch(patched, scope="model")
    if first == "patched":
        CHANGES[part](patched)
    CHANGES[part](original)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = original(x)
        assert not torch.allclose(original(torch.ones(1, 3, 64, 64)), before, atol=1e-3)
        torch.testing.assert_close(patched(x), wanted, rtol=1e-4, atol=1e-4)


def test_a_replaced_softmax_computes_itself():
    """No site is left of such a model, or each of them computes what the original does."""
    model = timm.create_model(SWIN[0], img_size=64, **WINDOWS).eval()
    CHANGES["softmax"](model)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = model(x)
        with contextlib.suppress(elsa.errors.NothingPatchedError):
            elsa.patch(model, scope="attention")
        torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
