"""torchvision's blocks, whose residuals go into the last product of what they add.

Read against torchvision 0.29. Swin-V2 normalises after the last product, and stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.swin_transformer import SwinTransformerBlock
from torchvision.models.vision_transformer import EncoderBlock

from elsa_core.patching.adapters.residual import Adds, added, added_by, normalised


class ElsaEncoderBlock(Adds, EncoderBlock):  # type: ignore[misc]  # torchvision is untyped
    """A ViT block: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = EncoderBlock

    def elsa_forward(self, input: Tensor) -> Tensor:
        torch._assert(input.dim() == 3, "input must be [batch, tokens, channels]")
        attend = self.self_attention

        def attended() -> Tensor:
            out: Tensor = normalised(
                attend, self.ln_1, input, lambda y: attend(y, y, y, need_weights=False)[0]
            )
            return out

        x = added_by(attended, input, attend, None, self.dropout)
        return added(x, self.ln_2, self.mlp, None, None)


class ElsaSwinTransformerBlock(Adds, SwinTransformerBlock):  # type: ignore[misc]
    """Swin's block: [B, H, W, C] -> [B, H, W, C], any floating dtype."""

    elsa_base = SwinTransformerBlock

    def elsa_forward(self, x: Tensor) -> Tensor:
        x = added(x, self.norm1, self.attn, None, self.stochastic_depth)
        return added(x, self.norm2, self.mlp, None, self.stochastic_depth)
