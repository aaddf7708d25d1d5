"""timm's bottleneck and halo attention on `elsa_core.attention`: convolutional layout, relative
positions by row and column, overlapping key blocks.

Read against timm 1.0.20, 1.0.29 and 1.0.31.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from torch import Tensor

from elsa_core.patching.adapters.common import all_pixels
from elsa_core.patching.adapters.decomposed import attend_decomposed, table_ahead


class ElsaBottleneckAttn(BottleneckAttn):  # type: ignore[misc]  # timm is untyped
    """Global attention over a feature map: [B, C, H, W] -> [B, C', H', W']."""

    elsa_base = BottleneckAttn
    elsa_precision: str
    elsa_backend: str

    @all_pixels(2, 3)
    def forward(self, x: Tensor) -> Tensor:
        height, width = self.pos_embed.height, self.pos_embed.width
        fits = x.shape[2] == height and x.shape[3] == width
        torch._assert(fits, f"features must be {height}x{width}, not {tuple(x.shape[2:])}")
        packed = self.qkv(x).flatten(2)
        sizes = [self.dim_out_qk, self.dim_out_qk, self.dim_out_v]
        q, k, v = (
            part.unflatten(1, (self.num_heads, -1)).transpose(2, 3)
            for part in packed.split(sizes, dim=1)
        )
        out = _attended(self, q, k, v, (height, width), (height, width))
        image = out.transpose(2, 3).flatten(1, 2).unflatten(2, (height, width))
        pooled: Tensor = self.pool(image)
        return pooled


class ElsaHaloAttn(HaloAttn):  # type: ignore[misc]  # timm is untyped
    """Each block of queries attends to its surroundings: [B, C, H, W] -> [B, C', H', W']."""

    elsa_base = HaloAttn
    elsa_precision: str
    elsa_backend: str

    @all_pixels(2, 3)
    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        block, side, win, halo = self.block_size, self.block_size_ds, self.win_size, self.halo_size
        fits = height % block == 0 and width % block == 0
        torch._assert(fits, f"{height}x{width} features must be multiples of the block, {block}")
        rows, columns = height // block, width // block
        q = self.q(x).unflatten(1, (self.num_heads, self.dim_head_qk))
        q = q.unflatten(4, (columns, side)).unflatten(3, (rows, side))
        # From [B, heads, D, rows, side, columns, side] to [B * heads, blocks, queries, D].
        q = q.permute(0, 1, 3, 5, 4, 6, 2).flatten(4, 5).flatten(2, 3).flatten(0, 1)
        kv = F.pad(self.kv(x), [halo, halo, halo, halo])
        kv = kv.unfold(2, win, block).unfold(3, win, block)  # [B, C, rows, columns, win, win]
        kv = kv.unflatten(1, (self.num_heads, -1)).permute(0, 1, 3, 4, 5, 6, 2)
        kv = kv.flatten(4, 5).flatten(2, 3).flatten(0, 1)  # [B * heads, blocks, keys, D + Dv]
        k, v = kv.split([self.dim_head_qk, self.dim_head_v], dim=-1)
        out = _attended(self, q, k, v, (side, side), (win, win))
        image = out.unflatten(2, (side, side)).unflatten(1, (rows, columns))
        image = image.unflatten(0, (batch, self.num_heads)).permute(0, 1, 6, 2, 4, 3, 5)
        pooled: Tensor = self.pool(image.flatten(5, 6).flatten(3, 4).flatten(1, 2))
        return pooled


def _attended(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_size: tuple[int, int],
    k_size: tuple[int, int],
) -> Tensor:
    rel_h = table_ahead(module.pos_embed.height_rel, q_size[0], k_size[0])
    rel_w = table_ahead(module.pos_embed.width_rel, q_size[1], k_size[1])
    if module.scale_pos_embed:
        rel_h, rel_w = rel_h * module.scale, rel_w * module.scale
    return attend_decomposed(module, q, k, v, rel_h, rel_w, scale=module.scale)
