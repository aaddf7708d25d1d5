"""Blocks whose residuals and LayerScale go into the last product of what they add.

Such a block is no site. Its class is swapped beside a site within it: where the whole model is
patched, so that its forward hands the terms on; where attention alone is, for the small calls whose
functions it calls one after another. A part that was not patched, drops something or has hooks is
called as before. Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from elsa_core.patching.adapters import flat
from elsa_core.patching.adapters.common import load_for_graph, trains_by_pytorch
from elsa_core.patching.adapters.host import (
    all_original,
    is_host_bound,
    is_unasked,
    is_within_original,
)
from elsa_core.patching.adapters.padding import is_packed
from elsa_core.patching.adapters.residual import added
from elsa_core.patching.adapters.rows import by_row


class ElsaBlock(Block):  # type: ignore[misc]  # timm is untyped
    """A ViT block: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = Block
    elsa_companion = True
    elsa_any_scope = True
    # where no layer within is patched "attention", or "auto" where that was not asked for
    elsa_scope: str = "model"
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
        if is_causal is not False:  # older versions do not have it
            terms["is_causal"] = is_causal
        own = super().forward
        if is_within_original(self):
            return self._original(x, terms)
        layered = self.elsa_scope == "model"
        # torch.fx calls with what is no tensor
        if not isinstance(x, Tensor) or not (layered or x.is_cuda):
            return own(x, **terms)  # type: ignore[no-any-return]

        def by_elsa() -> Tensor:
            if not layered:
                return own(x, **terms)  # type: ignore[no-any-return]
            y = added(x, self.norm1, self.attn, self.ls1, self.drop_path1, terms)
            return added(y, self.norm2, self.mlp, self.ls2, self.drop_path2)

        if is_packed(attn_mask):
            return by_elsa()
        # its largest product has four times as many channels, as MLPs have by default
        operator, work = "linear", 4 * x.numel() * x.shape[-1]
        if not layered:
            operator, work = "attention", x.numel() * x.shape[-2]
        if self._keeps_original(operator, x, work, by_elsa):
            out: Tensor = all_original(self._original, x, terms)
            return out
        plain = layered and attn_mask is None and is_causal is False
        row = by_row(self, x) if plain else None
        return by_elsa() if row is None else row

    def _original(self, x: Tensor, terms: dict[str, Any]) -> Tensor:
        """The original forward, in calls that are not compiled."""
        out = None
        if terms["attn_mask"] is None and not terms.get("is_causal"):
            read = flat.any_block if self.elsa_scope == "auto" else flat.block
            out = flat.served(self, read, x)
        return super().forward(x, **terms) if out is None else out  # type: ignore[no-any-return]

    def _keeps_original(
        self, operator: str, x: Tensor, work: int, by_elsa: Callable[[], Tensor]
    ) -> bool:
        """Whether the host would be waited for; or autocast leaves the linear layers to PyTorch,
        and a step attention too."""
        waits = is_host_bound(self, operator, x, work, by_elsa)
        asks = torch.is_grad_enabled() if waits else torch.is_autocast_enabled("cuda")
        if not asks:  # most calls: an attribute of a module takes the host a while
            return waits
        attn: Any = self.attn
        if getattr(type(attn), "elsa_base", None) is not Attention:  # may have no head_dim
            return waits
        projection: Any = getattr(attn, "qkv", None)  # another forward may have left it out
        if waits:
            load_for_graph(attn, x, projection)
            return True
        return is_unasked(self.__dict__) and trains_by_pytorch(attn, x, projection)
