"""Attention with a learned table of biases by offset, and values wider than queries: timm's LeViT,
EfficientFormer and EfficientViT (MSRA), on `elsa_core.attention`.

Read against timm 1.0.20, 1.0.29 and 1.0.31. In eval mode the models keep the gathered
biases in a cache of their own, which does not follow the weights; it is not read here.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.efficientformer import Attention as EfficientFormerAttention
from timm.models.efficientvit_msra import CascadedGroupAttention
from timm.models.levit import Attention, AttentionDownsample
from torch import Tensor

from elsa_core.base import calls
from elsa_core.patching.adapters.common import (
    all_pixels,
    all_tokens,
    attend,
    join_heads,
    split_heads,
)
from elsa_core.patching.adapters.derived import Derivation, Derives, derived


class _LearntBias(Derives):
    """What the four have in common: a bias for each head and pair of tokens."""

    attention_biases: Tensor
    attention_bias_idxs: Tensor

    def elsa_derivation(self) -> Derivation:
        """The biases [H, Nq, Nk] by pair."""
        return Derivation(self, self, _gathered, (self.attention_biases, self.attention_bias_idxs))


class ElsaLevitAttention(_LearntBias, Attention):  # type: ignore[misc]  # timm is untyped
    """[B, N, C] -> [B, N, C], or [B, C, H, W] -> [B, C, H, W] in the convolutional variant."""

    elsa_base = Attention
    elsa_precision: str
    elsa_backend: str

    @all_pixels(2, 3)
    def forward(self, x: Tensor) -> Tensor:
        heads = _heads(self.qkv(x), self.num_heads, self.use_conv)
        q, k, v = heads.split([self.key_dim, self.key_dim, self.val_dim], dim=-1)
        out = attend(self, q, k, v, derived(self.elsa_derivation()), scale=self.scale)
        projected: Tensor = self.proj(_joined(out, x.shape[2:] if self.use_conv else None))
        return projected


class ElsaLevitAttentionDownsample(_LearntBias, AttentionDownsample):  # type: ignore[misc]  # timm is untyped
    """The same with every `stride`-th token of both axes as query."""

    elsa_base = AttentionDownsample
    elsa_precision: str
    elsa_backend: str

    @all_pixels(2, 3)
    def forward(self, x: Tensor) -> Tensor:
        heads = _heads(self.kv(x), self.num_heads, self.use_conv)
        k, v = heads.split([self.key_dim, self.val_dim], dim=-1)
        q = _heads(self.q(x), self.num_heads, self.use_conv)
        out = attend(self, q, k, v, derived(self.elsa_derivation()), scale=self.scale)
        size = [(side - 1) // self.stride + 1 for side in x.shape[2:]] if self.use_conv else None
        projected: Tensor = self.proj(_joined(out, size))
        return projected


class ElsaEfficientFormerAttention(_LearntBias, EfficientFormerAttention):  # type: ignore[misc]
    """[B, N, C] -> [B, N, C]."""

    elsa_base = EfficientFormerAttention
    elsa_precision: str
    elsa_backend: str

    @all_tokens
    def forward(self, x: Tensor) -> Tensor:
        heads = _heads(self.qkv(x), self.num_heads, False)
        q, k, v = heads.split([self.key_dim, self.key_dim, self.val_dim], dim=-1)
        out = attend(self, q, k, v, derived(self.elsa_derivation()), scale=self.scale)
        projected: Tensor = self.proj(join_heads(out))
        return projected


class ElsaCascadedGroupAttention(_LearntBias, CascadedGroupAttention):  # type: ignore[misc]  # timm is untyped
    """One head after another, each fed with the output of the one before: [B, C, H, W]."""

    elsa_base = CascadedGroupAttention
    elsa_precision: str
    elsa_backend: str

    @all_pixels(2, 3)
    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        bias = derived(self.elsa_derivation())
        outputs: list[Tensor] = []
        parts = x.chunk(len(self.qkvs), dim=1)
        for head, (part, project, convolve) in enumerate(
            zip(parts, self.qkvs, self.dws, strict=True)
        ):
            packed = project(part + outputs[-1] if outputs else part)
            q, k, v = packed.split([self.key_dim, self.key_dim, self.val_dim], dim=1)
            q, k, v = (t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (convolve(q), k, v))
            out = attend(self, q, k, v, bias[head], scale=self.scale)
            outputs.append(_joined(out, size))
        projected: Tensor = self.proj(torch.cat(outputs, dim=1))
        return projected


def _gathered(module: Any) -> Tensor:
    """[H, Nq, Nk]"""
    table, index = module.attention_biases, module.attention_bias_idxs
    if not calls.wanted(table=table):  # half the time; its gradient would add in no fixed order
        found: Tensor = table.index_select(1, index.flatten()).unflatten(1, index.shape)
        return found
    gathered: Tensor = table[:, index]
    return gathered


def _heads(x: Tensor, num_heads: int, convolutional: bool) -> Tensor:
    """A view [B, H, N, D] of [B, N, H * D], or of [B, H * D, H', W']."""
    if not convolutional:
        return split_heads(x, num_heads)
    heads: Tensor = x.flatten(2).unflatten(1, (num_heads, -1)).transpose(2, 3)
    return heads


def _joined(out: Tensor, size: Any) -> Tensor:
    """[B, N, H * D] of the operator's result, or the dense image [B, H * D, *size]."""
    if size is None:
        return join_heads(out)
    # of one head flatten copies nothing; convolutions would take that for an image in channels-last
    # memory, and copy it more than once
    image: Tensor = out.transpose(2, 3).flatten(1, 2).contiguous().unflatten(2, tuple(size))
    return image
