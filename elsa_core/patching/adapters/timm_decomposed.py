"""timm's SAM, ViTDet and MViTv2 attention on `elsa_core.attention`, with decomposed relative
positions: a bias q . R_h[row, key row] + q . R_w[column, key column].

As a mask the bias is as large as the scores (805 MB for an image of SAM's at 64x64 tokens). Queries
[q * s, q R_h, q R_w] and keys [k, one-hot row, one-hot column] give scores that contain it.

Read against timm 1.0.20, 1.0.29 and 1.0.31. `MultiScaleAttentionPoolFirst` has no adapter: it
multiplies queries with keys of another layout and raises, in every version read.

Reference:
    MViTv2 (arXiv 2112.01526), Eq. 4; Bottleneck Transformers (arXiv 2101.11605).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from timm.models.mvitv2 import MultiScaleAttention, reshape_post_pool, reshape_pre_pool
from timm.models.vision_transformer_sam import Attention
from torch import Tensor

from elsa_core.base import calls
from elsa_core.base.limits import LARGEST_HEAD_DIM
from elsa_core.patching.adapters.common import (
    attend,
    drop_p,
    project,
    runs_original,
    scale_of,
    split_packed,
)

_Size = list[int]
_WIDEST = LARGEST_HEAD_DIM
_SMALL: Final = 1 << 20  # elements of queries


class ElsaSamAttention(Attention):  # type: ignore[misc]  # timm is untyped
    """Attention over an image or a window of it, [B, H, W, C] -> [B, H, W, C]."""

    elsa_base = Attention

    @runs_original(lambda site, x: x.numel() * x.shape[1] * x.shape[2])
    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1:3]
        q, k, v = split_packed(project(self, self.qkv, x.flatten(1, 2)), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        drop = drop_p(self)
        if self.use_rel_pos:
            tables = []
            for rel, n in zip((self.rel_pos_h, self.rel_pos_w), size, strict=True):
                length = 2 * n - 1
                fits = rel.shape[0] == length  # another is interpolated, as timm does
                of = rel if fits else F.interpolate(rel.t()[None], length, mode="linear")[0].t()
                tables.append(table(of, n, n))
            out = attend_decomposed(self, q, k, v, *tables, scale=scale_of(self), dropout_p=drop)
        else:
            if self.rope is not None:
                rope = self.rope.get_embed()
                q = apply_rot_embed_cat(q, rope).type_as(v)
                k = apply_rot_embed_cat(k, rope).type_as(v)
            out = attend(self, q, k, v, scale=scale_of(self), dropout_p=drop)
        tokens = self.proj_drop(project(self, self.proj, out.transpose(1, 2).flatten(2)))
        return tokens.unflatten(1, size)  # type: ignore[no-any-return]


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

    @runs_original(_pooled_work)
    def forward(self, x: Tensor, feat_size: _Size) -> tuple[Tensor, _Size]:
        q, k, v = split_packed(project(self, self.qkv, x), self.num_heads)
        pools = (self.pool_q, self.norm_q), (self.pool_k, self.norm_k), (self.pool_v, self.norm_v)
        pooled, sizes = [], []
        for part, (pool, norm) in zip((q, k, v), pools, strict=True):
            out, size = part, feat_size
            if pool is not None:
                out, token = reshape_pre_pool(out, size, self.has_cls_token)
                out, size = reshape_post_pool(pool(out), self.num_heads, token)
            pooled.append(out if norm is None else norm(out))
            sizes.append(size)
        (q, k, v), (q_size, k_size, _) = pooled, sizes
        if self.rel_pos_type == "spatial":
            rel_h = table(self.rel_pos_h, q_size[0], k_size[0])
            rel_w = table(self.rel_pos_w, q_size[1], k_size[1])
            prefix = int(self.has_cls_token)
            out = attend_decomposed(self, q, k, v, rel_h, rel_w, scale=self.scale, prefix=prefix)
        else:
            out = attend(self, q, k, v, scale=self.scale)
        if self.residual_pooling:
            out = out + q
        return project(self, self.proj, out.transpose(1, 2).flatten(2)), q_size


def attend_decomposed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_h: Tensor,
    rel_w: Tensor,
    *,
    scale: float | None,
    prefix: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """The operator with decomposed relative positions: [B, H, prefix + qh * qw, D] -> the same with
    Dv channels. Keys are [B, H, prefix + kh * kw, D]; `prefix` tokens in front have no position.
    rel_h [qh, kh, D] and rel_w [qw, kw, D] are multiplied with the unscaled queries: `scale`, 1 /
    sqrt(D) if None, is of the scores alone."""
    (q_rows, k_rows, dim), (q_columns, k_columns, _) = rel_h.shape, rel_w.shape
    scale = dim**-0.5 if scale is None else scale
    grid = query[:, :, prefix:].unflatten(2, (q_rows, q_columns))
    by_row = torch.einsum("bnhwc,hkc->bnhwk", grid, rel_h)
    by_column = torch.einsum("bnhwc,wkc->bnhwk", grid, rel_w)
    if dim + k_rows + k_columns > _WIDEST:
        by_row, by_column = by_row.flatten(2, 3), by_column.flatten(2, 3)
        bias = (by_row.unsqueeze(-1) + by_column.unsqueeze(-2)).flatten(-2)
        mask = F.pad(bias, (prefix, 0, prefix, 0))
        return attend(module, query, key, value, mask, scale=scale, dropout_p=dropout_p)
    # zeros, with which rows are aligned as a GPU's kernels read them fast
    more = -(dim + k_rows + k_columns) % 8 if key.is_cuda else 0
    places = _places((k_rows, k_columns), more, prefix, key)
    # One dtype: autocast may have turned the products, but not the operands, to half precision.
    offsets = [by_row.to(query.dtype), by_column.to(query.dtype)]
    wide = query * scale
    # beyond that size launches cost less than what they read: two copies are no slower
    few = not prefix and key.is_cuda and not calls.traced() and wide.numel() <= _SMALL
    if few and (wide.shape[0] == 1 or wide.stride(0) == wide.shape[1] * wide.stride(1)):
        # One launch reads the offsets as the products left them; it takes four dimensions.
        offsets = [t.flatten(0, 1) for t in offsets]
        if more:
            offsets.append(query.new_zeros(*offsets[0].shape[:3], more))
        grid = wide.flatten(0, 1).unflatten(1, (q_rows, q_columns))
        query = torch.cat((grid, *offsets), dim=-1).flatten(1, 2).unflatten(0, query.shape[:2])
    else:
        offsets = [t.flatten(2, 3) for t in offsets]
        if prefix:
            offsets = [F.pad(torch.cat(offsets, dim=-1), (0, 0, prefix, 0))]
        if more:
            offsets.append(query.new_zeros(*query.shape[:3], more))
        query = torch.cat((wide, *offsets), dim=-1)
    key = torch.cat((key, places.expand(*key.shape[:2], -1, -1)), dim=-1)
    return attend(module, query, key, value, scale=1.0, dropout_p=dropout_p)


def _places(keys: tuple[int, int], more: int, prefix: int, like: Tensor) -> Tensor:
    """[prefix + rows * columns, rows + columns + more]: one-hot row and column of each key."""
    rows, columns = keys
    if like.is_cuda and not calls.traced():  # in three launches
        shape = prefix + rows * columns, rows + columns + more
        found = torch.zeros(shape, dtype=like.dtype, device=like.device)
        grid = found[prefix:].unflatten(0, keys)
        grid[..., :rows].diagonal(dim1=0, dim2=2).fill_(1)
        grid[..., rows : rows + columns].diagonal(dim1=1, dim2=2).fill_(1)
        return found
    of_row = F.one_hot(torch.arange(rows, device=like.device), rows)
    of_column = F.one_hot(torch.arange(columns, device=like.device), columns)
    parts = of_row[:, None].expand(-1, columns, -1), of_column[None].expand(rows, -1, -1)
    found = torch.cat(parts, dim=-1).flatten(0, 1)
    return F.pad(found, (0, more, prefix, 0)).to(like.dtype)


def table(rel: Tensor, queries: int, keys: int) -> Tensor:
    """[queries, keys, D] from relative embeddings [L, D], as SAM and MViTv2 count them: entry
    (i, j) is of i - j, both in steps of the coarser axis."""
    q_step, k_step = max(keys / queries, 1.0), max(queries / keys, 1.0)
    i = torch.arange(queries, device=rel.device)[:, None] * q_step
    j = torch.arange(keys, device=rel.device)[None, :] * k_step
    return rel[(i - j + (keys - 1) * k_step).long()]
