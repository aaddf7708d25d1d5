"""timm's plain softmax attentions in eager PyTorch, or with operands that must be copied
first: one projection, one softmax, at most a bias; on `elsa_core.attention`.

Read against timm 1.0.20, 1.0.29 and 1.0.31.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.convit import MHSA
from timm.models.crossvit import CrossAttention
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.nest import Attention as NestAttention
from timm.models.shvit import SHSA
from timm.models.tnt import Attention as TntAttention
from timm.models.visformer import Attention as VisformerAttention
from timm.models.volo import ClassAttention
from torch import Tensor

from elsa_core.patching.adapters.common import (
    all_pixels,
    all_tokens,
    attend,
    drop_p,
    first_token,
    join_heads,
    other_part,
    project,
    runs_original,
    scale_of,
    split_heads,
    split_packed,
)

# Until 1.0.29 timm gave an image's windows the global queries of other images; kept as it is there.
_IMAGE_MAJOR = "repeat_interleave" in WindowAttentionGlobal.forward.__code__.co_names


def _projected(module: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention, and the projection and dropout that most of these end with: [B, N, H * Dv]."""
    out = attend(module, q, k, v, bias, scale=scale_of(module), dropout_p=drop_p(module))
    projected: Tensor = module.proj_drop(project(module, module.proj, join_heads(out)))
    return projected


class ElsaCrossAttention(CrossAttention):  # type: ignore[misc]  # timm is untyped
    """CrossViT: the first token attends to all, [B, N, C] -> [B, 1, C]."""

    elsa_base = CrossAttention
    elsa_precision: str
    elsa_backend: str

    @first_token
    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.wq(x[:, :1]), self.num_heads)
        k, v = (
            split_heads(project(self, layer, x), self.num_heads) for layer in (self.wk, self.wv)
        )
        return _projected(self, q, k, v)


class ElsaVoloClassAttention(ClassAttention):  # type: ignore[misc]  # timm is untyped
    """VOLO: the class token attends to all, [B, N, C] -> [B, 1, C]."""

    elsa_base = ClassAttention
    elsa_precision: str
    elsa_backend: str

    @first_token
    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.q(x[:, :1]), self.num_heads)
        k, v = (
            split_heads(half, self.num_heads) for half in project(self, self.kv, x).chunk(2, dim=-1)
        )
        return _projected(self, q, k, v)


class ElsaTntAttention(TntAttention):  # type: ignore[misc]  # timm is untyped
    """TNT, whose queries may be narrower than its values: [B, N, C] -> [B, N, C]."""

    elsa_base = TntAttention
    elsa_precision: str
    elsa_backend: str

    @all_tokens
    def forward(self, x: Tensor) -> Tensor:
        q, k = (
            split_heads(half, self.num_heads) for half in project(self, self.qk, x).chunk(2, dim=-1)
        )
        v = split_heads(project(self, self.v, x), self.num_heads)
        return _projected(self, q, k, v)


class ElsaConvitMHSA(MHSA):  # type: ignore[misc]  # timm is untyped
    """ConViT's last blocks: [B, N, C] -> [B, N, C]."""

    elsa_base = MHSA
    elsa_precision: str
    elsa_backend: str

    @all_tokens
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_packed(project(self, self.qkv, x), self.num_heads)
        return _projected(self, q, k, v)


class ElsaNestAttention(NestAttention):  # type: ignore[misc]  # timm is untyped
    """NesT: within each of T blocks of the image, [B, T, N, C] -> [B, T, N, C]."""

    elsa_base = NestAttention
    elsa_precision: str
    elsa_backend: str

    @runs_original()
    def forward(self, x: Tensor) -> Tensor:
        batch, blocks = x.shape[:2]
        q, k, v = split_packed(project(self, self.qkv, x).flatten(0, 1), self.num_heads)
        out = attend(self, q, k, v, dropout_p=drop_p(self))
        joined = out.permute(0, 2, 3, 1).flatten(2)  # NesT puts the heads last
        projected: Tensor = self.proj_drop(
            project(self, self.proj, joined.unflatten(0, (batch, blocks)))
        )
        return projected


class ElsaWindowAttentionGlobal(WindowAttentionGlobal):  # type: ignore[misc]  # timm is untyped
    """GC ViT: windows [B * windows, N, C], with their own queries or with those of the image."""

    elsa_base = WindowAttentionGlobal
    elsa_precision: str
    elsa_backend: str

    @all_tokens
    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        if self.use_global and q_global is not None:
            fits = x.shape[-1] == q_global.shape[-1]
            torch._assert(fits, "the windows and q_global must have as many channels")
            k, v = (
                split_heads(half, self.num_heads)
                for half in project(self, self.qkv, x).chunk(2, dim=-1)
            )
            windows = x.shape[0] // q_global.shape[0]
            q = q_global.flatten(1, -2)
            q = q.repeat_interleave(windows, 0) if _IMAGE_MAJOR else q.repeat(windows, 1, 1)
            q = split_heads(q, self.num_heads)
        else:
            q, k, v = split_packed(project(self, self.qkv, x), self.num_heads)
        return _projected(self, q, k, v, self.rel_pos.get_bias())


class ElsaSHSA(SHSA):  # type: ignore[misc]  # timm is untyped
    """SHViT: one head over a part of the channels, [B, C, H, W] -> [B, C, H, W]."""

    elsa_base = SHSA
    elsa_precision: str
    elsa_backend: str

    @all_pixels(2, 3)
    def forward(self, x: Tensor) -> Tensor:
        attended, rest = x.split([self.pdim, self.dim - self.pdim], dim=1)
        packed = self.qkv(self.pre_norm(attended)).flatten(2).transpose(1, 2).unsqueeze(1)
        q, k, v = packed.split([self.qk_dim, self.qk_dim, self.pdim], dim=-1)
        out = attend(self, q, k, v, scale=self.scale)
        image = out.squeeze(1).transpose(1, 2).unflatten(2, tuple(x.shape[2:]))
        projected: Tensor = self.proj(torch.cat((image, rest), dim=1))
        return projected


class ElsaVisformerAttention(VisformerAttention):  # type: ignore[misc]  # timm is untyped
    """Visformer: all pixels of an image, [B, C, H, W] -> [B, C, H, W]."""

    elsa_base = VisformerAttention
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why it keeps its own forward: a part of its eager branch, where that is on."""
        return "" if module.fused_attn else other_part(module)

    @all_pixels(2, 3)
    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).flatten(2).unflatten(1, (3, self.num_heads, self.head_dim))
        # as the original for PyTorch's kernel, which copies the three one by one
        q, k, v = packed.permute(1, 0, 2, 4, 3).contiguous().unbind(0)
        out = attend(self, q, k, v, scale=scale_of(self), dropout_p=drop_p(self))
        # an image in the memory order that it came in, which the rest of the model has
        image = out.transpose(2, 3).flatten(1, 2).contiguous().unflatten(2, tuple(x.shape[2:]))
        projected: Tensor = self.proj_drop(self.proj(image))
        return projected
