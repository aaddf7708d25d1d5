"""timm's VisionTransformer with its tokens sharded over the ranks of a group.

The sequence of class token, registers and patches is cut into one run of tokens for each rank, of
equal lengths but for one token. Every rank is given the whole image and embeds the rows of patches
that its tokens lie in. Attention goes through `elsa_core.distributed.attention`; all else between
the embedding and the pooling is of single tokens. What pooling reads of other ranks is gathered and
summed in their order, and the head runs on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from timm.layers import resample_abs_pos_embed
from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from elsa_core.distributed.attention import attention
from elsa_core.distributed.groups import by_name
from elsa_core.distributed.plan import shard_lengths
from elsa_core.errors import ArgumentError, ModelError
from elsa_core.monoid import state_dtype
from elsa_core.patching.adapters.common import join_heads, project, split_packed
from elsa_core.patching.adapters.timm_attention import ElsaAttention, gate_of

_LOWEST = float("-inf")


class ShardedAttention(ElsaAttention):
    """timm's ViT attention over all ranks' tokens: [B, n, C] -> [B, n, C] of this rank."""

    elsa_base = Attention
    elsa_group: str
    elsa_lengths: tuple[int, ...]

    def elsa_added(
        self,
        x: Tensor,
        residual: Tensor | None,
        scale: Tensor | None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        norm: nn.Module | None = None,
    ) -> Tensor:
        """residual + scale * forward(norm(x)); the first two are for calls without dropout."""
        if norm is not None and getattr(self, "gate", None) is not None:
            x, norm = norm(x), None  # the gate reads it too
        gate = gate_of(self, x)
        q, k, v = split_packed(project(self, self.qkv, x, norm=norm), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        out = attention(
            q, k, v, _with_rank_4(attn_mask), group=self.elsa_group, is_causal=is_causal,
            scale=self.scale, lengths=self.elsa_lengths, precision=self.elsa_precision,
            backend=self.elsa_backend,
        )  # fmt: skip
        y = self.norm(join_heads(out))
        if gate is not None:
            y = y * gate
        y = project(self, self.proj, y, residual=residual, scale=scale)
        return self.proj_drop(y)  # type: ignore[no-any-return]


def _with_rank_4(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


class ShardedVisionTransformer(VisionTransformer):  # type: ignore[misc]  # timm is untyped
    """A ViT of which each rank holds a run of tokens: whole images in, whole outputs out.

    `forward_features` gives this rank's tokens [B, n, C] alone; `forward` and `forward_head` of
    them what the model gives in one process.
    """

    elsa_base = VisionTransformer
    elsa_companion = True
    elsa_precision: str
    elsa_backend: str
    elsa_group: str
    elsa_lengths: tuple[int, ...]

    def forward_features(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        _check_blocks(self)
        grid = _grid(self, x)
        start, stop = _own_tokens(self, grid)
        x = self.norm_pre(_embedded(self, x, grid, start, stop))
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            attn_mask = attn_mask[..., start:stop, :]
        for block in self.blocks:
            if attn_mask is not None or is_causal:
                x = block(x, attn_mask=attn_mask, is_causal=is_causal)
            elif self.grad_checkpointing:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        pool_type = self.global_pool if pool_type is None else pool_type
        if self.attn_pool is not None or not pool_type:
            whole = _gathered(self, x, self.elsa_lengths)
            return super().pool(whole, pool_type)  # type: ignore[no-any-return]
        if pool_type == "token":
            first = [int(rank == 0) for rank in range(len(self.elsa_lengths))]
            own = x[:, : first[by_name(self.elsa_group).rank()]]
            return _gathered(self, own, first)[:, 0]
        return _pooled(self, x, pool_type)

    def forward_intermediates(self, *arguments: Any, **options: Any) -> Any:
        raise ModelError(
            "forward_intermediates of a sharded model: a rank holds a part of the tokens; take "
            "forward_features, which gives them"
        )


def _check_blocks(model: Any) -> None:
    """A site that was patched or unpatched since attends within its rank's tokens alone."""
    for i, block in enumerate(model.blocks):
        if not isinstance(block.attn, ShardedAttention):
            raise ModelError(
                f"blocks.{i}.attn was patched after the model was sharded: shard again"
            )
    if not model.training:
        return
    for path, module in model.named_modules():
        rate = getattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else 0.0
        if rate or getattr(module, "drop_prob", 0.0):
            raise ModelError(
                f"{path} drops in training, which ranks would do differently: set its rate to 0"
            )


def _grid(model: Any, images: Tensor) -> tuple[int, int]:
    """Rows and columns of patches of a batch [B, C, H, W]."""
    embed = model.patch_embed
    height, width = images.shape[-2:]
    if embed.strict_img_size and (height, width) != tuple(embed.img_size):
        raise ArgumentError(
            f"images of {height} x {width} pixels: the model takes {embed.img_size[0]} x "
            f"{embed.img_size[1]}"
        )
    rows, columns = embed.patch_size
    if height % rows or width % columns:
        raise ArgumentError(
            f"images of {height} x {width} pixels are not made of patches of {rows} x {columns}"
        )
    return height // rows, width // columns


def _own_tokens(model: Any, grid: tuple[int, int]) -> tuple[int, int]:
    """Where this rank's run begins and ends; `elsa_lengths` is that of the last image."""
    group = by_name(model.elsa_group)
    lengths = shard_lengths(model.num_prefix_tokens + grid[0] * grid[1], group.size())
    if lengths != model.elsa_lengths:  # images of another size, where the model takes them
        for module in (model, *(block.attn for block in model.blocks)):
            module.elsa_lengths = lengths
    start = sum(lengths[: group.rank()])
    return start, start + lengths[group.rank()]


def _embedded(model: Any, images: Tensor, grid: tuple[int, int], start: int, stop: int) -> Tensor:
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
    return model.pos_drop(x)  # type: ignore[no-any-return]


def _gathered(model: Any, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """[B, n, C] of each rank -> [B, sum(lengths), C] on every rank. Differentiable."""
    whole: Tensor = torch.ops.elsa.gather_shards(tokens, list(lengths), model.elsa_group)
    return whole


def _pooled(model: Any, x: Tensor, pool_type: str) -> Tensor:
    """[B, C]: mean, maximum or half their sum, over the tokens of all ranks."""
    lengths = model.elsa_lengths
    skipped = 0 if model.pool_include_prefix else model.num_prefix_tokens
    start = sum(lengths[: by_name(model.elsa_group).rank()])
    own = x[:, max(skipped - start, 0) :]
    one_each = [1] * len(lengths)
    results = []
    if pool_type in ("max", "avgmax"):
        # a rank without tokens to pool stays in the graph, for the gradients' sake
        none = own.shape[1] == 0
        top = own.sum(1, keepdim=True) + _LOWEST if none else own.amax(1, keepdim=True)
        results.append(_gathered(model, top, one_each).amax(1))
    if pool_type in ("avg", "avgmax"):
        # in float32 as PyTorch's mean has it, rounded once
        total = own.sum(1, keepdim=True, dtype=state_dtype(x.dtype))
        mean = _gathered(model, total, one_each).sum(1) / (sum(lengths) - skipped)
        results.append(mean.to(x.dtype))
    return results[0] if len(results) == 1 else 0.5 * (results[0] + results[1])
