"""timm's MViTv2 attention on `elsa_core.attention`: pooled queries, keys and values, decomposed
relative positions, residual pooling.

Read against timm 1.0.20, 1.0.29 and 1.0.31. `MultiScaleAttentionPoolFirst` has no adapter: it
multiplies queries with keys of another layout and raises, in every version read.
"""

from __future__ import annotations

from typing import Any

from timm.models.mvitv2 import MultiScaleAttention, reshape_post_pool, reshape_pre_pool
from torch import Tensor

from elsa_core.patching.adapters.common import (
    attend,
    join_heads,
    project,
    runs_original,
    split_packed,
)
from elsa_core.patching.adapters.decomposed import attend_decomposed, table

_Size = list[int]


def _pooled_work(site: Any, x: Tensor) -> int:
    work: int = x.shape[0] * site.dim_out
    for pool in (site.pool_q, site.pool_k):
        stride = getattr(pool, "stride", 1)  # of rows and columns
        rows, columns = stride if isinstance(stride, tuple) else (stride, stride)
        work *= x.shape[1] // (rows * columns)
    return work


class ElsaMultiScaleAttention(MultiScaleAttention):  # type: ignore[misc]  # timm is untyped
    """Pooling after the projection: [B, N, C] -> [B, N', C'] and the size of N'."""

    elsa_base = MultiScaleAttention

    @runs_original(_pooled_work, layered=False)
    def forward(self, x: Tensor, feat_size: _Size) -> tuple[Tensor, _Size]:
        q, k, v = split_packed(project(self, self.qkv, x), self.num_heads)
        q, q_size = _pooled(self, q, feat_size, self.pool_q, self.norm_q)
        k, k_size = _pooled(self, k, feat_size, self.pool_k, self.norm_k)
        v, _ = _pooled(self, v, feat_size, self.pool_v, self.norm_v)
        if self.rel_pos_type == "spatial":
            rel_h = table(self.rel_pos_h, q_size[0], k_size[0])
            rel_w = table(self.rel_pos_w, q_size[1], k_size[1])
            prefix = int(self.has_cls_token)
            out = attend_decomposed(self, q, k, v, rel_h, rel_w, scale=self.scale, prefix=prefix)
        else:
            out = attend(self, q, k, v, scale=self.scale)
        if self.residual_pooling:
            out = out + q
        return project(self, self.proj, join_heads(out)), q_size


def _pooled(module: Any, x: Tensor, feat_size: _Size, pool: Any, norm: Any) -> tuple[Tensor, _Size]:
    size = feat_size
    if pool is not None:
        x, token = reshape_pre_pool(x, feat_size, module.has_cls_token)
        x, size = reshape_post_pool(pool(x), module.num_heads, token)
    return (x if norm is None else norm(x)), size
