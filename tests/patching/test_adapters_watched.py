"""What others do to an attention that elsa computes: watch it, drop its weights, replace it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from originals import of_original
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from timm.models.tnt import Attention as TntAttention
from torch import Tensor, nn

from elsa_core.errors import ArgumentError
from elsa_core.patching.rewrite import patch, unpatch

SWIN = {
    "img_size": 52, "window_size": 4, "embed_dim": 24, "depths": (2,), "num_heads": (2,),
    "num_classes": 6,
}  # fmt: skip
IMAGES = (2, 3, 52, 52)  # 13 x 13 tokens in windows of 4 x 4: padded
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def randomised(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def swin(fused: bool = False) -> Any:
    model = randomised(timm.create_model("swin_tiny_patch4_window7_224", **SWIN))
    for module in model.modules():
        if isinstance(module, WindowAttention):
            module.fused_attn = fused
    return model


@torch.no_grad()
def assert_as_before(model: Any, change: Callable[[Any], object], *, after: bool) -> None:
    """The model, changed before or after patching, computes what it does unpatched."""
    x = torch.randn(IMAGES)
    expected = copy.deepcopy(model)
    change(expected)
    changed = expected(x)
    assert not torch.allclose(changed, model(x), rtol=1e-3)
    if after:
        patch(model)
        change(model)
    else:
        change(model)
        patch(model)
    torch.testing.assert_close(model(x), changed, rtol=1e-4, atol=1e-4)


# --- dropout -----------------------------------------------------------------------------------


def test_dropout_with_a_mode_of_its_own_drops() -> None:
    """Monte Carlo dropout: the model in eval mode, its dropouts in training."""
    attention = randomised(TntAttention(16, 16, num_heads=2, attn_drop=0.5))
    patch(attention)
    attention.attn_drop.train()
    x = torch.randn(2, 9, 16)
    assert not torch.allclose(attention(x), attention(x))
    attention.eval()
    expected = attention(x)
    assert torch.equal(attention(x), expected)
    attention.attn_drop = nn.Identity()
    torch.testing.assert_close(attention(x), expected)
    other = copy.deepcopy(attention)  # replaced before patching
    unpatch(other)
    patch(other)
    torch.testing.assert_close(other(x), expected)


# --- hooks and other forwards ------------------------------------------------------------------


SMALL = {
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "swin-v2": ("swinv2_tiny_window8_256", SWIN),
    "swin-v2-cr": ("swinv2_cr_tiny_224", SWIN),
    "twins": (
        "twins_svt_small",
        {"img_size": 52, "embed_dims": (16,), "num_heads": (2,), "depths": (1,), "wss": (4,),
         "mlp_ratios": (2,), "sr_ratios": (8,)},
    ),
    "davit": (
        "davit_tiny", {"embed_dims": (16,), "num_heads": (2,), "depths": (1,), "window_size": 4}
    ),
    "tiny-vit": (
        "tiny_vit_5m_224",
        {"embed_dims": (8, 32), "num_heads": (1, 2), "depths": (1, 1), "window_sizes": (7, 4)},
    ),
}  # fmt: skip
PARTS = [
    *((kind, part) for kind in SMALL for part in ("qkv", "proj")),
    *(("tiny-vit", "norm"), ("twins", "attn_drop"), ("swin", "softmax")),
]


@pytest.mark.parametrize(("kind", "part"), PARTS)
@torch.no_grad()
def test_hooks_inside_an_attention_see_what_they_saw(kind: str, part: str) -> None:
    """Padded windows, and not the image that the operator reads."""
    name, options = SMALL[kind]
    model = randomised(of_original(lambda: timm.create_model(name, **options)))
    seen: list[torch.Size] = []

    def halve(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        seen.append(out.shape)
        return out * 0.5 + 0.1

    within = [m for m in model.modules() if hasattr(m, "qkv") and hasattr(m, part)]
    for module in within:
        module.fused_attn, module.qkv_bias_separate = False, True  # calls all of its parts
        getattr(module, part).register_forward_hook(halve)
    x = torch.randn(IMAGES)
    expected = model(x)
    shapes = [*seen]
    patch(model)
    seen.clear()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert seen == shapes and shapes


def test_a_wrapped_projection_runs_once() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.shapes = inner, list[torch.Size]()

        def forward(self, x: Tensor) -> Tensor:
            self.shapes.append(x.shape)
            return 2 * self.inner(x)

    def change(model: Any) -> None:
        attention = model.layers[0].blocks[0].attn
        attention.qkv = Wrapped(attention.qkv)

    model = swin(fused=True)
    assert_as_before(model, change, after=True)
    whole = model.layers[0].blocks[0].attn.qkv
    whole.shapes.clear()
    with torch.no_grad():
        model.set_input_size((64, 64))
        model(torch.randn(2, 3, 64, 64))
    assert len(whole.shapes) == 1  # nothing is padded there


@pytest.mark.parametrize("after", [False, True])
def test_a_forward_put_into_the_attention_of_a_block(after: bool) -> None:
    def change(model: Any) -> None:
        attention = model.layers[0].blocks[0].attn
        own = attention.forward
        attention.forward = lambda x, mask=None: 3 * own(x, mask)

    assert_as_before(swin(fused=True), change, after=after)


def test_a_forward_put_into_an_instance_is_a_reason() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **VIT).eval()
    own = model.blocks[0].attn.forward
    model.blocks[0].attn.forward = lambda *given, **named: 2 * own(*given, **named)
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    report = patch(model)
    assert [site.path for site in report.patched] == ["blocks.1.attn"]
    assert "replaced on the instance" in report.kept[0].reason
    torch.testing.assert_close(model(x), expected)


def test_an_entry_put_into_an_instance_is_a_reason() -> None:
    """A block is taken at a method of its own, which the class swap would not reach."""
    model = swin(fused=True)
    block = model.layers[0].blocks[0]
    own = block._attn
    block._attn = lambda x: 2 * own(x)
    report = patch(model)
    assert "_attn was replaced on the instance" in report.kept[0].reason


def test_a_forward_put_into_the_class_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes that merge tokens or show maps do that."""
    own = Attention.forward

    def halved(self: Any, x: Tensor, *given: Any, **named: Any) -> Any:
        return 0.5 * own(self, x, *given, **named)

    model = timm.create_model("vit_tiny_patch16_224", **VIT).eval()
    monkeypatch.setattr(Attention, "forward", halved)
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    patch(model, scope="attention")
    torch.testing.assert_close(model(x), expected)


def test_weights_of_an_unfused_vit_are_shown() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **VIT).eval()
    attention = model.blocks[0].attn
    attention.fused_attn = False
    shapes = []
    attention.attn_drop.register_forward_hook(lambda module, given, out: shapes.append(out.shape))
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    patch(model)
    torch.testing.assert_close(model(x), expected)
    assert shapes == [(2, 2, 17, 17)] * 2


def test_a_class_that_gets_another_forward() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    def doubled(self: Any, x: Tensor) -> Tensor:
        return 2 * torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 5, 8)
    for factor, forward in ((1, Scaled.forward), (2, doubled)):
        Scaled.forward = forward  # type: ignore[method-assign]
        module = Scaled()
        patch(module)
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        torch.testing.assert_close(module(x), factor * expected)


# --- weights and calls -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_nested_tensors_beyond_self_attention_are_refused() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    patch(attention)
    q, k = (torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)]) for _ in range(2))
    with pytest.raises(ArgumentError, match="nested"):
        attention(q, k, k, need_weights=False)
    with pytest.raises(ArgumentError, match="nested"):
        attention(q, q, q)
    with pytest.raises(ArgumentError, match="nested"):
        attention(q, q, q, need_weights=False, attn_mask=torch.zeros(5, 5))
    assert attention(q, q, q, need_weights=False)[0].is_nested
