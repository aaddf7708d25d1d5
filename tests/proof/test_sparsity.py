"""`check` grants sparsity its bound and nothing beyond: not to layers, not to the exact kind."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import elsa_core as elsa
from elsa_core.errors import ArgumentError

BOUND = 0.3


def sharp(size: float = 1.5) -> VisionTransformer:
    """A small ViT of 256 tokens whose scores differ so much that tiles are left out."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=64, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5,
        class_token=False, global_pool="avg",
    ).eval()  # fmt: skip
    with torch.no_grad():
        # each token looks for those beside it
        model.pos_embed.copy_(torch.eye(16).repeat_interleave(16, 0).repeat(1, 2) * 3)
        for block in model.blocks:
            block.attn.qkv.weight[:64] = torch.eye(32).repeat(2, 1) * size
    return model


def image() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 0.1


def test_exact_passes_without_a_bound() -> None:
    model = sharp(2.5)
    report = elsa.patch(model, sparsity="exact", scope="attention")
    assert report.sparsity == report.to_dict()["sparsity"] == "exact"
    checked = elsa.check(model, image(), stress=False)
    assert checked.ok, checked.failures
    assert all(site.skip_rate is not None and site.skip_rate > 0.1 for site in checked.sites)


def test_a_number_costs_an_error_and_fails_above_the_bound() -> None:
    model = sharp()
    elsa.patch(model, sparsity=0.02, scope="attention")
    without = elsa.check(model, image(), stress=False)
    assert not without.ok and "blocks.0.attn" in without.failures[0]
    error = max(site.patched_error for site in without.sites)
    assert 1e-5 < error < BOUND
    within = elsa.check(model, image(), stress=False, sparsity_bound=BOUND)
    assert within.ok, within.failures
    for site in within.sites:
        assert site.skip_rate > 0.3 and BOUND < site.allowed < BOUND + 1e-4
        assert site.to_dict()["skip_rate"] == site.skip_rate
    beyond = elsa.check(model, image(), stress=False, sparsity_bound=error / 3)
    assert not beyond.ok
    with pytest.raises(ArgumentError, match="has no gradients: check it without grad"):
        elsa.check(model, image(), sparsity_bound=BOUND, grad=True)
    with pytest.raises(ArgumentError, match="sparsity_bound=-1"):
        elsa.check(model, image(), sparsity_bound=-1.0)


def test_the_bound_is_for_what_leaves_out_by_a_number_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong kernel is not excused by it."""
    model = sharp()
    elsa.patch(model, sparsity="exact", scope="attention")
    monkeypatch.setenv("ELSA_FAULT_INJECTION", "blocks.1.attn:1e-3")
    found = elsa.check(model, image(), stress=False, sparsity_bound=BOUND)
    assert not found.ok and found.failures[0].startswith("blocks.1.attn: ")


def test_a_layer_is_not_granted_what_attention_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every site was patched with the number; a layer among them computes all of its product."""
    model = sharp()
    elsa.patch(model, sparsity=0.02, scope="model")
    path = "blocks.1.mlp"
    assert vars(model.get_submodule(path))["elsa_sparsity"] == 0.02
    sound = elsa.check(model, image(), stress=False, sparsity_bound=BOUND)
    assert sound.ok, sound.failures
    assert all((site.allowed > BOUND) == (site.skip_rate is not None) for site in sound.sites)
    monkeypatch.setenv("ELSA_FAULT_INJECTION", f"{path}:1e-3")
    found = elsa.check(model, image(), stress=False, sparsity_bound=BOUND)
    assert not found.ok and found.failures[0].startswith(f"{path}: ")
