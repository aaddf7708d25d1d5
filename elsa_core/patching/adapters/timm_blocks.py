"""Blocks whose residuals and LayerScale go into the last product of what they add.

Such a block is no site. Its class is swapped beside a site within it, where the whole model is
patched, so that its forward hands the terms on; a part that was not patched, drops something or has
hooks is called as before. Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer import Block
from torch import Tensor, nn

from elsa_core.patching.adapters import flat
from elsa_core.patching.adapters.common import all_original, is_host_bound
from elsa_core.patching.adapters.residual import added


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

        def by_elsa() -> Tensor:
            y = added(x, self.norm1, self.attn, self.ls1, self.drop_path1, terms)
            return added(y, self.norm2, self.mlp, self.ls2, self.drop_path2)

        # its largest product has four times as many channels, as MLPs have by default
        if is_host_bound(self, "linear", x, 4 * x.numel() * x.shape[-1], by_elsa):
            whole = attn_mask is None and not is_causal
            out = flat.served(self, flat.block, x) if whole else None
            return all_original(super().forward, x, **terms) if out is None else out
        return by_elsa()
