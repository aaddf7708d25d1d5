"""Blocks whose residuals and LayerScale go into the last product of what they add.

Such a block is no site. Its class is swapped beside a site within it, where the whole model is
patched, so that its forward hands the terms on; a part that was not patched, drops something or has
hooks is called as before. Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

from typing import Any

from timm.layers.drop import DropPath
from timm.layers.layer_scale import LayerScale
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from elsa_core.patching.adapters.common import is_shown


class ElsaBlock(Block):  # type: ignore[misc]  # timm is untyped
    """A ViT block: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = Block
    elsa_companion = True
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_serves(module: Any) -> tuple[nn.Module, ...]:
        """The sites whose products take the block's terms."""
        return module.attn, module.mlp

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        terms: dict[str, Any] = {"attn_mask": attn_mask}
        if is_causal:  # older versions do not have it
            terms["is_causal"] = True
        x = _added(x, self.norm1(x), self.attn, self.ls1, self.drop_path1, terms)
        return _added(x, self.norm2(x), self.mlp, self.ls2, self.drop_path2, {})


def _added(
    x: Tensor, normed: Tensor, part: Any, scale: Any, drop_path: Any, terms: dict[str, Any]
) -> Tensor:
    """x + drop_path(scale(part(normed))), in the part's last product where it can take them."""
    if _folds(part) and _idles(drop_path) and _scales(scale):
        gamma = None if type(scale) is nn.Identity else scale.gamma
        folded: Tensor = part.elsa_added(normed, x, gamma, **terms)
        return folded
    added: Tensor = x + drop_path(scale(part(normed, **terms)))
    return added


def _folds(part: Any) -> bool:
    """Whether a part is patched, has no hooks and drops nothing after its last product."""
    if not hasattr(part, "elsa_added") or is_shown(part):
        return False
    last = part.drop2 if hasattr(part, "drop2") else part.proj_drop
    return _idles(last)


def _idles(drop: Any) -> bool:
    """Whether dropout, or the dropping of paths, hands on what it gets."""
    if type(drop) is nn.Identity:
        return not is_shown(drop)
    if type(drop) is nn.Dropout:
        return not is_shown(drop) and (not drop.training or drop.p == 0.0)
    active = type(drop) is not DropPath or (drop.training and drop.drop_prob != 0.0)
    return not active and not is_shown(drop)


def _scales(scale: Any) -> bool:
    return type(scale) in (nn.Identity, LayerScale) and not is_shown(scale)
