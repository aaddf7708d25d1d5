"""timm's VisionTransformer with its tokens sharded over the ranks of a group.

The sequence of class token, registers and patches is cut into one run of tokens for each rank, of
equal lengths but for one token. Every rank is given the whole image and embeds the rows of patches
that its tokens lie in. Attention goes through `elsa_core.distributed.attention`; all else between
the embedding and the pooling is of single tokens. What pooling reads of other ranks is gathered and
summed in their order, and the head runs on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.utils.checkpoint
from timm.layers import resample_abs_pos_embed
from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from elsa_core.distributed.attention import attention, explain
from elsa_core.distributed.groups import place
from elsa_core.distributed.plan import Plan, shard_lengths
from elsa_core.errors import ModelError
from elsa_core.patching.adapters.sharded import (
    check_drops,
    check_hooks,
    check_length,
    compare_calls,
    gathered,
    grid_of,
    pooled,
)
from elsa_core.patching.adapters.timm_attention import ElsaAttention
from elsa_core.precision import dtype_name


class ShardedAttention(ElsaAttention):
    """timm's ViT attention over all ranks' tokens: [B, n, C] -> [B, n, C] of this rank."""

    elsa_base = Attention
    elsa_group: str
    elsa_lengths: tuple[int, ...]

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Any:
        return self.elsa_added(x, None, None, attn_mask, is_causal)

    def _elsa_attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool) -> Any:
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        return attention(
            q, k, v, mask, group=self.elsa_group, is_causal=is_causal, scale=self.scale,
            lengths=self.elsa_lengths, precision=self.elsa_precision, backend=self.elsa_backend,
        )  # fmt: skip


class ShardedVisionTransformer(VisionTransformer):  # type: ignore[misc]  # timm is untyped
    """A ViT of which each rank holds a run of tokens: whole images in, whole outputs out.

    `forward_features` gives this rank's tokens [B, n, C] alone; `forward` and `forward_head` of
    them what the model gives in one process.
    """

    elsa_base = VisionTransformer
    elsa_companion = True
    elsa_group: str
    elsa_lengths: tuple[int, ...]

    def forward_features(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Any:
        mask = None if attn_mask is None else [dtype_name(attn_mask.dtype), *attn_mask.shape]
        compare_calls(
            self, x, lambda: _check(self, x), is_causal=is_causal, attn_mask=mask or "none"
        )
        grid = grid_of(self.patch_embed, x)
        lengths = _lengths(self, grid)
        self.elsa_lengths = lengths
        rank, _ = place(self.elsa_group)
        start = sum(lengths[:rank])
        stop = start + lengths[rank]
        x = self.norm_pre(_embedded(self, x, grid, start, stop))
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            attn_mask = attn_mask[..., start:stop, :]
        for block in self.blocks:
            if attn_mask is not None or is_causal:
                x = _called(block, lengths, x, attn_mask=attn_mask, is_causal=is_causal)
            elif self.grad_checkpointing and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(
                    _called, block, lengths, x, use_reentrant=False
                )
            else:
                x = _called(block, lengths, x)
        return self.norm(x)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Any:
        pool_type = self.global_pool if pool_type is None else pool_type
        lengths, group = self.elsa_lengths, self.elsa_group
        rank, _ = place(group)
        if self.attn_pool is not None or not pool_type:
            whole = gathered(x, lengths, group)
            return super().pool(whole, pool_type)
        if pool_type == "token":
            first = [int(not other) for other in range(len(lengths))]
            return gathered(x[:, : first[rank]], first, group)[:, 0]
        skipped = 0 if self.pool_include_prefix else self.num_prefix_tokens
        if skipped:
            check_length(x.shape[1], lengths, group)
        own = x[:, max(skipped - sum(lengths[:rank]), 0) :]
        return pooled(own, pool_type, group)

    def forward_intermediates(self, *arguments: Any, **options: Any) -> Any:
        raise ModelError(
            "forward_intermediates of a sharded model: a rank holds a part of the tokens; take "
            "forward_features, which gives them"
        )

    def elsa_plan(self, images: Tensor) -> Plan:
        """How the attention of a batch [B, C, H, W] is served, and what all blocks of it send."""
        lengths = _lengths(self, grid_of(self.patch_embed, images))
        attention = self.blocks[0].attn
        own = lengths[place(self.elsa_group)[0]]
        shape = (images.shape[0], attention.num_heads, own, attention.head_dim)
        x = images.detach().flatten()[:1].view(1, 1, 1, 1).expand(shape)  # without memory
        found = explain(x, x, x, group=self.elsa_group, lengths=lengths)
        depth = len(self.blocks)
        sent, back = depth * found.bytes_sent, depth * found.bytes_sent_backward
        return replace(found, bytes_sent=sent, bytes_sent_backward=back)


def passed_over(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules that timm's forward calls and this one does not call as a whole, by path."""
    found = [(name, getattr(model, name)) for name in ("patch_embed", "patch_drop", "blocks")]
    for i, block in enumerate(model.blocks):
        if not block.attn.fused_attn:  # attention weights pass through it
            found.append((f"blocks.{i}.attn.attn_drop", block.attn.attn_drop))
    return found


def _check(model: Any, images: Tensor) -> None:
    """A site that was patched or unpatched since attends within its rank's tokens alone, and hooks
    may have been registered."""
    for i, block in enumerate(model.blocks):
        if not isinstance(block.attn, ShardedAttention):
            raise ModelError(
                f"blocks.{i}.attn was patched after the model was sharded: shard again"
            )
    check_hooks(passed_over(model))
    check_drops(model)
    grid_of(model.patch_embed, images)


def _lengths(model: Any, grid: tuple[int, int]) -> tuple[int, ...]:
    """Each rank's tokens of an image of rows and columns of patches."""
    tokens = model.num_prefix_tokens + grid[0] * grid[1]
    return shard_lengths(tokens, place(model.elsa_group)[1])


def _called(block: Any, lengths: tuple[int, ...], x: Tensor, **terms: Any) -> Any:
    """A block on tokens of these lengths: a checkpoint computes it again after images of another
    size."""
    if block.attn.elsa_lengths != lengths:
        block.attn.elsa_lengths = lengths
    return block(x, **terms)


def _embedded(model: Any, images: Tensor, grid: tuple[int, int], start: int, stop: int) -> Any:
    """This rank's tokens [B, stop - start, C] with their positions.

    A rank without patches, or without prefix tokens, takes none of some: its parameters then have
    a gradient, of zeros.
    """
    embed, prefix = model.patch_embed, model.num_prefix_tokens
    first, last = max(start - prefix, 0), max(stop - prefix, 0)
    top = min(first // grid[1], grid[0] - 1)
    bottom = max(-(-last // grid[1]), top + 1)
    height = embed.patch_size[0]
    rows = embed.proj(images[..., top * height : bottom * height, :])
    skipped = top * grid[1]
    x = embed.norm(rows.flatten(2).transpose(1, 2))[:, first - skipped : last - skipped]
    positions = model.pos_embed
    if positions is not None and model.dynamic_img_size:
        positions = resample_abs_pos_embed(
            positions,
            new_size=grid,
            old_size=embed.grid_size,
            num_prefix_tokens=0 if model.no_embed_class else prefix,
        )
    if positions is not None and model.no_embed_class:
        x = x + positions[:, first:last]
    parts = [token for token in (model.cls_token, model.reg_token) if token is not None]
    if parts:
        heads = torch.cat(parts, 1)[:, start : min(stop, prefix)]
        x = torch.cat([heads.expand(x.shape[0], -1, -1), x], 1)
    if positions is not None and not model.no_embed_class:
        x = x + positions[:, start:stop]
    return model.pos_drop(x)
