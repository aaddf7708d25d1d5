"""timm's ViT block, whose residuals and LayerScale go into the last product of what they add.

Such a block is no site: its class is swapped beside the sites within it, where linear layers are
patched too. Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

from typing import Any

from timm.layers.drop import DropPath
from timm.models.vision_transformer import Block, LayerScale
from torch import Tensor, nn

from elsa_core.base import calls
from elsa_core.patching.adapters.hooks import is_watched
from elsa_core.patching.adapters.timm_attention import ElsaAttention
from elsa_core.patching.adapters.timm_mlp import ElsaMlp

_RATES = {nn.Dropout: "p", DropPath: "drop_prob"}


class ElsaBlock(Block):  # type: ignore[misc]  # timm is untyped
    """A ViT block: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = Block
    elsa_companion = True

    def forward(self, x: Tensor, *given: Any, **named: Any) -> Any:
        attn, mlp = self.attn, self.mlp
        if not _folds(self, x) or attn.elsa_runs_original(x, (*given, None)[0]):
            return super().forward(x, *given, **named)
        scale1, scale2 = getattr(self.ls1, "gamma", None), getattr(self.ls2, "gamma", None)
        x = attn.elsa_added(self.norm1(x), x, scale1, *given, **named)
        return mlp.elsa_added(self.norm2(x), x, scale2)


def _folds(block: Any, x: Tensor) -> bool:
    """Whether nothing but elsa's own classes computes what the block adds: no other module stands
    in the place of a part, nothing watches it, and nothing is dropped after the last product."""
    attn, mlp = block.attn, block.mlp
    if type(attn) is not ElsaAttention or type(mlp) is not ElsaMlp or not isinstance(x, Tensor):
        return False
    # a recorded program on a CPU holds PyTorch's own products, but for ONNX, which has a node
    if not x.is_cuda and calls.recorded() and not calls.keeps_products():
        return False
    drops = (attn.proj_drop, mlp.drop2, block.drop_path1, block.drop_path2)
    for drop in drops:
        cls = type(drop)
        if cls not in (nn.Identity, nn.Dropout, DropPath):
            return False
        if drop.training and cls is not nn.Identity and getattr(drop, _RATES[cls]):
            return False
    scales = (block.ls1, block.ls2)
    if any(type(scale) not in (nn.Identity, LayerScale) for scale in scales):
        return False
    return not is_watched(attn, mlp, *drops, *scales)
