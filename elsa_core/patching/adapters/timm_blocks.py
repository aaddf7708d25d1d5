"""timm's ViT block, whose residuals and LayerScale go into the last product of what they add.

Such a block is no site: its class is swapped beside the sites within it, where linear layers are
patched too. Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

from typing import Any

from timm.layers.drop import DropPath
from timm.layers.layer_scale import LayerScale
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from elsa_core.base import calls
from elsa_core.patching.adapters.common import is_idle
from elsa_core.patching.adapters.hooks import is_watched
from elsa_core.patching.adapters.timm_attention import ElsaAttention
from elsa_core.patching.adapters.timm_mlp import ElsaMlp


class ElsaBlock(Block):  # type: ignore[misc]  # timm is untyped
    """A ViT block: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = Block
    elsa_companion = True

    @staticmethod
    def elsa_serves(module: Any) -> tuple[nn.Module, ...]:
        """The sites whose products take the block's terms."""
        return module.attn, module.mlp

    def forward(self, x: Tensor, *given: Any, **named: Any) -> Tensor:
        attn, mlp = self.attn, self.mlp
        if not _folds(self, x) or attn.elsa_runs_original(x, (*given, None)[0]):
            whole: Tensor = super().forward(x, *given, **named)
            return whole
        x = attn.elsa_added(self.norm1(x), x, _gamma(self.ls1), *given, **named)
        added: Tensor = mlp.elsa_added(self.norm2(x), x, _gamma(self.ls2))
        return added


def _folds(block: Any, x: Tensor) -> bool:
    """Whether nothing but elsa's own classes computes what the block adds: no other module stands
    in the place of a part, nothing watches it, and nothing is dropped after the last product.
    """
    attn, mlp = block.attn, block.mlp
    if type(attn) is not ElsaAttention or type(mlp) is not ElsaMlp:
        return False
    if is_watched(attn) or is_watched(mlp) or not isinstance(x, Tensor):
        return False
    # a recorded program on a CPU holds PyTorch's own products, but for ONNX, which has a node
    if not x.is_cuda and calls.recorded() and not calls.keeps_products():
        return False
    paths, scales = (block.drop_path1, block.drop_path2), (block.ls1, block.ls2)
    return (
        is_idle(attn.proj_drop)
        and is_idle(mlp.drop2)
        and all(map(_keeps_all, paths))
        and all(map(_scales, scales))
    )


def _keeps_all(path: Any) -> bool:
    drops = type(path) is DropPath and path.training and path.drop_prob
    return is_idle(path) or (type(path) is DropPath and not drops and not is_watched(path))


def _scales(scale: Any) -> bool:
    return is_idle(scale) or (type(scale) is LayerScale and not is_watched(scale))


def _gamma(scale: Any) -> Tensor | None:
    gamma: Tensor | None = getattr(scale, "gamma", None)
    return gamma
