"""Heads of sharded models on features of an earlier forward, and hooks that come after `shard`."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer

import elsa_core as elsa

from .models import said

# ViTs by their pooling and class token, Swins by their pooling
RIGHT: dict[str, dict[str, Any]] = {
    "vit, mean": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "vit, token": {"global_pool": "token"},
    "swin, mean": {"global_pool": "avg"},
    "swin, both": {"global_pool": "avgmax"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "vit, mean of patches": {"global_pool": "avg"},
    "vit, attention pooling": {"global_pool": "map", "class_token": False},
    "vit, tokens": {"global_pool": ""},
    "swin, tokens": {"global_pool": "", "num_classes": 0},
}
HOOKED = {
    "vit": ("patch_embed", "patch_drop", "blocks", "blocks.1.attn.attn_drop"),
    "swin": ("patch_embed", "layers", "layers.1", "layers.1.blocks"),
}
POOLS = ("head", "head.global_pool")


def small(name: str) -> Any:
    """A model that takes images of any size."""
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 4, "num_classes": 5, **(RIGHT | REFUSED).get(name, {})}
    if name.startswith("vit"):
        return VisionTransformer(
            embed_dim=16, depth=2, num_heads=2, dynamic_img_size=True, **options
        ).eval()
    return SwinTransformer(
        embed_dim=8, depths=(2, 2), num_heads=(1, 2), window_size=4, strict_img_size=False,
        **options,
    ).eval()  # fmt: skip


@torch.no_grad()
def of_earlier_features(world: int) -> dict[str, Any]:
    """How far a head of features is from one process's after a forward of larger images, or what it
    says. On three ranks the smaller images leave one of them without rows of a Swin."""
    short, tall = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 64, 32)
    found: dict[str, Any] = {}
    for name in RIGHT:
        plain, model = small(name), elsa.distributed.shard(small(name))
        features = model.forward_features(short)  # type: ignore[operator]
        model.forward_features(tall)  # type: ignore[operator]
        out = model.forward_head(features)  # type: ignore[operator]
        found[name] = (out - plain(short)).abs().max().item()
    for name in REFUSED if world == 2 else ():
        short = torch.randn(2, 3, 64, 32)
        tall = torch.randn(2, 3, 128, 32)
        model = elsa.distributed.shard(small(name))
        features = model.forward_features(short)  # type: ignore[operator]
        model.forward_features(tall)  # type: ignore[operator]
        found[name] = said(lambda m=model, x=features: m.forward_head(x))
        model.forward_features(short)  # type: ignore[operator]
        found[f"{name}, again"] = said(lambda m=model, x=features: m.forward_head(x))
    return found


@torch.no_grad()
def of_later_hooks() -> dict[str, str]:
    """What a forward says by module that has a hook since the model was sharded."""
    found = {}
    batch = torch.randn(1, 3, 32, 32)
    for name, paths in HOOKED.items():
        model = small(name)
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
        elsa.distributed.shard(model)(batch)
        for path in paths:
            hook = model.get_submodule(path).register_forward_hook(lambda *given: None)
            found[f"{name}: {path}"] = said(lambda m=model: m(batch))
            hook.remove()
        if name == "swin":
            for path in POOLS:
                hook = model.get_submodule(path).register_forward_pre_hook(lambda *given: None)
                found[path] = said(lambda m=model: m(batch))
                hook.remove()
        found[f"{name}: "] = said(lambda m=model: m(batch))
    return found
