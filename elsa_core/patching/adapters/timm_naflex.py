"""timm's `NaFlexVit` (images of different size in one batch, padded): padding is left out.

Read against timm 1.0.31. The model is no site: its class is swapped beside its attention layers.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from elsa_core import dispatch
from elsa_core.base import calls
from elsa_core.patching.adapters import padding
from elsa_core.patching.adapters.common import weights_are_hooked
from elsa_core.patching.adapters.hooks import is_watched
from elsa_core.patching.adapters.padding import Padding
from elsa_core.patching.adapters.timm_attention import ElsaAttention

# What pools a batch without reading padded tokens.
_POOLS = ("avg", "avgmax", "max", "token", "map")


class ElsaNaFlexVit(NaFlexVit):  # type: ignore[misc]  # timm is untyped
    """In inference of batches with padding: patches [B, N, P * P * C] -> [B, classes].

    `forward` takes the tokens of all images one after another through the blocks and puts them back
    for the pooling, which reads no padding. `forward_features` and training keep padded tokens in
    the blocks, and leave them out of attention alone; what stands at their places is then what the
    original gives.
    """

    elsa_base = NaFlexVit
    elsa_companion = True
    elsa_any_scope = True
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why an instance keeps its class; it is no site, so no report names it."""
        known = hasattr(module, "_forward_embeds") and hasattr(module, "use_key_only_attn_mask")
        return "" if known else "this timm's NaFlexVit makes its mask elsewhere"

    @staticmethod
    def elsa_serves(module: Any) -> tuple[nn.Module, ...]:
        """The sites that take note of padding."""
        return tuple(block.attn for block in module.blocks if hasattr(block, "attn"))

    def forward(
        self,
        x: Any,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        given = x if isinstance(x, dict) else {"patches": x}
        terms = {
            "patch_coord": given.get("patch_coord", patch_coord),
            "patch_valid": given.get("patch_valid", patch_valid),
            "attn_mask": given.get("attn_mask", attn_mask),
        }
        if _may_pack(self, given["patches"], **terms) and all(map(_is_plain, self.blocks)):
            return self._packed(given["patches"], terms)
        whole: Tensor = super().forward(x, patch_coord, patch_valid, attn_mask)
        return whole

    def _packed(self, patches: Tensor, terms: dict[str, Tensor | None]) -> Tensor:
        embeds = self._forward_embeds(patches, **terms)
        if embeds["patches"].is_cuda:
            self._note(embeds)
        tokens, found = embeds["patches"], padding.noted(embeds["attn_mask"])
        if found is None or found.rows is None:  # little padding
            for block in self.blocks:
                tokens = block(tokens, attn_mask=embeds["attn_mask"])
        else:
            tokens = _through_blocks(self.blocks, tokens, found, found.rows)
        pooled: Tensor = self.forward_head(self.norm(tokens), patch_valid=embeds["patch_valid"])
        return pooled

    def _forward_embeds(
        self, x: Any, patch_coord: Any, patch_valid: Any, attn_mask: Any
    ) -> dict[str, Any]:
        embeds: dict[str, Any] = super()._forward_embeds(x, patch_coord, patch_valid, attn_mask)
        if attn_mask is None and not x.is_cuda:
            self._note(embeds)
        return embeds

    def _note(self, embeds: dict[str, Any]) -> None:
        valid, mask = embeds["patch_valid"], embeds["attn_mask"]
        if valid is not None and mask is not None:
            prefix = valid.new_ones((valid.shape[0], self.num_prefix_tokens), dtype=torch.bool)
            every = torch.cat((prefix, valid.bool()), 1)
            # a pooling of no patch reads what stands at padded places
            least = self.num_prefix_tokens + 1
            padding.note(mask, every, not self.use_key_only_attn_mask, least)


def _through_blocks(blocks: Any, tokens: Tensor, found: Padding, rows: Tensor) -> Tensor:
    """[B, N, C] -> [B, N, C], zeros where padding is."""
    mask = padding.packed_mask(found)
    packed = tokens.flatten(0, 1)[rows].unsqueeze(0)  # [1, T, C]
    for block in blocks:
        packed = block(packed, attn_mask=mask)
    places = tokens.new_zeros(tokens.shape[0] * tokens.shape[1], packed.shape[2])
    put: Tensor = places.index_copy(0, rows, packed.squeeze(0))
    whole: Tensor = put.unflatten(0, tokens.shape[:2])
    return whole


def _may_pack(
    model: Any,
    patches: Tensor,
    patch_coord: Tensor | None,
    patch_valid: Tensor | None,
    attn_mask: Tensor | None,
) -> bool:
    """Whether blocks that are plain can take a call's tokens packed, where no tracer sees it."""
    if patch_coord is None or patch_valid is None or attn_mask is not None:
        return False
    if calls.traced() or model.rope is not None:
        return False
    if model.attn_pool is None and model.global_pool not in _POOLS:
        return False
    if model.grad_checkpointing or "forward_features" in vars(model):
        return False
    site = getattr(model.blocks[0], "attn", None) if len(model.blocks) else None
    return isinstance(site, ElsaAttention) and padding.may_wait(
        patches, site.num_heads, site.head_dim, site
    )


def _is_plain(block: Any) -> bool:
    """Whether a block is timm's own, in eval mode, with a patched attention and without hooks."""
    if getattr(type(block), "elsa_base", type(block)) is not Block:
        return False
    if not isinstance(block.attn, ElsaAttention) or weights_are_hooked(block.attn):
        return False
    if block.attn.elsa_backend not in dispatch.names("varlen_attention"):
        return False
    return not any(
        part.training or is_watched(part) or part._compiled_call_impl or "forward" in vars(part)
        for part in block.modules()
    )
