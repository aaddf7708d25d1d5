"""Heads of sharded models on features of an earlier forward, and hooks that come after `shard`."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

import elsa_core as elsa

from .models import said

# ViTs by their pooling and class token
RIGHT: dict[str, dict[str, Any]] = {
    "mean": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "token": {"global_pool": "token"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "mean of patches": {"global_pool": "avg"},
    "attention pooling": {"global_pool": "map", "class_token": False},
    "tokens": {"global_pool": ""},
}
HOOKED = ("patch_embed", "patch_drop", "blocks", "blocks.1.attn.attn_drop")


def small(name: str) -> Any:
    """A model that takes images of any size, and whose attention weights pass modules."""
    torch.manual_seed(0)
    options = (RIGHT | REFUSED).get(name, {})
    model = VisionTransformer(
        img_size=32, patch_size=4, num_classes=5, embed_dim=16, depth=2, num_heads=2,
        dynamic_img_size=True, **options,
    )  # fmt: skip
    for block in model.blocks:
        block.attn.fused_attn = False
    return model.eval()


@torch.no_grad()
def of_earlier_features(world: int) -> dict[str, Any]:
    """How far a head of features is from one process's after a forward of larger images, or what it
    says."""
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
    batch, model = torch.randn(1, 3, 32, 32), small("")
    elsa.distributed.shard(model)(batch)
    found = {}
    for path in HOOKED:
        hook = model.get_submodule(path).register_forward_hook(lambda *given: None)
        found[path] = said(lambda: model(batch))
        hook.remove()
    return found | {"": said(lambda: model(batch))}
