"""timm's `NaFlexVit` (images of different size in one batch, padded): padding is left out.

Read against timm 1.0.31. The model is no site: its class is swapped beside its attention layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block
from torch import Tensor

from elsa_core.patching.adapters import padding
from elsa_core.patching.adapters.common import weights_are_hooked
from elsa_core.patching.adapters.timm_attention import ElsaAttention

# What pools a batch without reading padded tokens.
_POOLS = ("avg", "avgmax", "max", "token", "map")


class ElsaNaFlexVit(NaFlexVit):  # type: ignore[misc]  # timm is untyped
    """In inference of batches with padding: patches [B, N, P * P * C] -> [B, classes]. `forward`
    takes the tokens of all images one after another through the blocks and puts them back for the
    pooling, which reads no padding."""

    elsa_base = NaFlexVit
    elsa_companion = True
    elsa_any_scope = True

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        return "" if hasattr(module, "_forward_embeds") else "this timm's embeds otherwise"

    def forward(
        self,
        x: Any,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Any:
        given = x if isinstance(x, dict) else {"patches": x}
        coord = given.get("patch_coord", patch_coord)
        valid = given.get("patch_valid", patch_valid)
        masked = given.get("attn_mask", attn_mask) is not None
        if coord is None or valid is None or masked or not _may_pack(self, given["patches"]):
            return super().forward(x, patch_coord, patch_valid, attn_mask)
        embeds = self._forward_embeds(given["patches"], coord, valid, None)
        tokens, valid = embeds["patches"], embeds["patch_valid"]  # [B, N, C]
        prefix = valid.new_ones((valid.shape[0], self.num_prefix_tokens), dtype=torch.bool)
        there = torch.cat((prefix, valid.bool()), 1)
        # a pooling of no patch reads what stands at padded places
        longest = padding.longest(there, self.num_prefix_tokens + 1)
        if longest:
            ends = F.pad(there.sum(1).cumsum(0), (1, 0)).int()
            mask: Any = padding.Packed(ends, longest)
            rows = there.flatten().nonzero().squeeze(1)
            packed = tokens.flatten(0, 1)[rows].unsqueeze(0)  # [1, T, C]
            for block in self.blocks:
                packed = block(packed, attn_mask=mask)
            places = tokens.new_zeros(there.numel(), packed.shape[2])
            tokens = places.index_copy(0, rows, packed.squeeze(0)).unflatten(0, there.shape)
        else:
            for block in self.blocks:
                tokens = block(tokens, attn_mask=embeds["attn_mask"])
        return self.forward_head(self.norm(tokens), patch_valid=valid)


def _may_pack(model: Any, patches: Tensor) -> bool:
    if model.rope is not None or model.grad_checkpointing or "forward_features" in vars(model):
        return False
    if model.attn_pool is None and model.global_pool not in _POOLS:
        return False
    for block in model.blocks:
        own = getattr(type(block), "elsa_base", type(block)) is Block
        if not own or weights_are_hooked(block.attn):
            return False
    return padding.may_pack(patches, model.blocks, "attn", ElsaAttention)
