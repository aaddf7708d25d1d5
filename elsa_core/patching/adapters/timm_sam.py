"""timm's SAM and ViTDet attention on `elsa_core.attention`, without the bias in memory.

Read against timm 1.0.20, 1.0.29 and 1.0.31.
"""

from __future__ import annotations

import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from timm.models.vision_transformer_sam import Attention
from torch import Tensor

from elsa_core.patching.adapters.common import (
    attend,
    drop_p,
    join_heads,
    project,
    runs_original,
    scale_of,
    split_packed,
)
from elsa_core.patching.adapters.decomposed import attend_decomposed, table


class ElsaSamAttention(Attention):  # type: ignore[misc]  # timm is untyped
    """Attention over an image or a window of it, [B, H, W, C] -> [B, H, W, C]."""

    elsa_base = Attention

    @runs_original(lambda site, x: x.numel() * x.shape[1] * x.shape[2])
    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        q, k, v = split_packed(project(self, self.qkv, x.flatten(1, 2)), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        drop = drop_p(self)
        if self.use_rel_pos:
            rel_h = table(_resized(self.rel_pos_h, height), height, height)
            rel_w = table(_resized(self.rel_pos_w, width), width, width)
            out = attend_decomposed(
                self, q, k, v, rel_h, rel_w, scale=scale_of(self), dropout_p=drop
            )
        else:
            if self.rope is not None:
                rope = self.rope.get_embed()
                q = apply_rot_embed_cat(q, rope).type_as(v)
                k = apply_rot_embed_cat(k, rope).type_as(v)
            out = attend(self, q, k, v, scale=scale_of(self), dropout_p=drop)
        image: Tensor = self.proj_drop(project(self, self.proj, join_heads(out))).unflatten(
            1, (height, width)
        )
        return image


def _resized(rel: Tensor, size: int) -> Tensor:
    """Relative embeddings [2 * size - 1, D]; interpolated, as timm does, from another size."""
    length = 2 * size - 1
    if rel.shape[0] == length:
        return rel
    return F.interpolate(rel.t()[None], size=length, mode="linear")[0].t()
