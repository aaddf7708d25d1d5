"""timm's `Attention`, `AttentionRope` and `EvaAttention` (EVA-02, DINOv3, Perception Encoder) on
`elsa_core.attention`.

Read against timm 1.0.20 (no is_causal, no gate), 1.0.29 (both) and 1.0.31 (grouped key/value heads
in AttentionRope). Nothing is copied on either side of the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from elsa_core.patching.adapters.common import (
    attend,
    drop_p,
    is_small,
    project,
    project_by,
    runs_original,
    scale_of,
    split_heads,
    split_packed,
    trains_by_pytorch,
    weights_are_hooked,
)
from elsa_core.patching.adapters.padding import Packed, attend_packed

_Module: Any = nn.Module  # untyped, as timm's classes are that stand beside it


class _Attention(_Module):  # type: ignore[misc]
    def elsa_added(
        self,
        x: Tensor,
        residual: Tensor | None,
        scale: Tensor | None,
        attn_mask: Any = None,
        is_causal: bool = False,
        rope: Tensor | None = None,
    ) -> Any:
        """residual + scale * forward(x); the two are for calls without dropout."""
        gate = getattr(self, "gate", None)
        opening = None if gate is None else gate(x).sigmoid()  # [B, N, C]
        if self.qkv is not None:
            q, k, v = split_packed(self._elsa_packed(x), self.num_heads)
        else:
            kv_heads = getattr(self, "num_kv_heads", None) or self.num_heads
            q = split_heads(project(self, self.q_proj, x), self.num_heads)
            k = split_heads(project(self, self.k_proj, x), kv_heads)
            v = split_heads(project(self, self.v_proj, x), kv_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            prefix, half = self.num_prefix_tokens, getattr(self, "rotate_half", False)
            q, k = (  # the class and register tokens in front have no position
                torch.cat(
                    [t[:, :, :prefix], apply_rot_embed_cat(t[:, :, prefix:], rope, half=half)], 2
                ).type_as(v)
                for t in (q, k)
            )
        out = self._elsa_attend(q, k, v, attn_mask, is_causal)
        x = self.norm(out.transpose(1, 2).flatten(2))  # a view
        if opening is not None:
            x = x * opening
        return self.proj_drop(project(self, self.proj, x, residual=residual, scale=scale))

    def _elsa_packed(self, x: Tensor) -> Tensor:
        if getattr(self, "q_bias", None) is None:
            return project(self, self.qkv, x)
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))  # EVA's
        if self.qkv_bias_separate:
            packed = project(self, self.qkv, x)
            packed += bias
            return packed
        return project_by(self, x, self.qkv.weight, bias)

    def _elsa_attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool) -> Tensor:
        scale = scale_of(self)
        if isinstance(mask, Packed):
            return attend_packed(self, q, k, v, mask, scale)
        drop = drop_p(self)
        return attend(self, q, k, v, mask, scale=scale, dropout_p=drop, is_causal=is_causal)


class ElsaAttention(_Attention, Attention):  # type: ignore[misc]  # timm is untyped
    """timm's ViT attention: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = Attention

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Any:
        if self.elsa_runs_original(x, attn_mask):
            # older versions do not have is_causal; of torch.fx it is a symbol
            more = {} if is_causal is False else {"is_causal": is_causal}
            return super().forward(x, attn_mask, **more)
        return self.elsa_added(x, None, None, attn_mask, is_causal)

    def elsa_runs_original(self, x: Tensor, attn_mask: Any) -> bool:
        """Whether the original forward has to run, or is the cheaper one."""
        if not isinstance(x, Tensor):  # torch.fx traces the original, and finds its names
            return True
        if isinstance(attn_mask, Packed):  # which the original cannot read
            return False
        # in half precision PyTorch computes the layers
        alone = x.dtype != torch.float32 or "elsa_base" not in type(self._modules["proj"]).__dict__
        if alone and is_small(self, x, x.numel() * x.shape[-2]):
            return True
        return weights_are_hooked(self) or trains_by_pytorch(self, x, self.qkv)


class _RopeAttention(_Attention):
    @runs_original(lambda site, x: x.numel() * x.shape[-2])
    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        return self.elsa_added(x, None, None, attn_mask, is_causal, rope)


class ElsaAttentionRope(_RopeAttention, AttentionRope):  # type: ignore[misc]
    """timm's attention with rotary positions: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = AttentionRope


class ElsaEvaAttention(_RopeAttention, EvaAttention):  # type: ignore[misc]
    """EVA's attention, whose keys have no bias: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = EvaAttention
