"""timm's `Attention` and `AttentionRope` on `elsa_core.attention`.

Read against timm 1.0.20 (no is_causal, no gate), 1.0.29 (both) and 1.0.31 (grouped key/value heads
in AttentionRope). Queries, keys and values stay views of the packed projection, and the heads come
back side by side, so that nothing is copied on either side of the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from timm.layers.attention import Attention, AttentionRope
from torch import Tensor

from elsa_core.patching.adapters.common import (
    all_tokens,
    attend,
    computes_layers,
    drop_p,
    is_small,
    join_heads,
    project,
    scale_of,
    split_heads,
    split_packed,
    trains_by_pytorch,
    weights_are_hooked,
)
from elsa_core.patching.adapters.padding import Packed, attend_packed


class ElsaAttention(Attention):  # type: ignore[misc]  # timm is untyped
    """timm's ViT attention: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = Attention

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Any:
        if self.elsa_runs_original(x, attn_mask):
            # older versions do not have is_causal
            return super().forward(x, attn_mask, **({"is_causal": True} if is_causal else {}))
        return self.elsa_added(x, None, None, attn_mask, is_causal)

    def elsa_runs_original(self, x: Tensor, attn_mask: Tensor | None) -> bool:
        """Whether the original forward has to run, or is the cheaper one."""
        if not isinstance(x, Tensor):  # torch.fx traces the original, and finds its names
            return True
        if isinstance(attn_mask, Packed):  # which the original cannot read
            return False
        # in half precision PyTorch computes the layers
        alone = x.dtype != torch.float32 or not computes_layers(self)
        if alone and is_small(self, x, x.numel() * x.shape[-2]):
            return True
        return weights_are_hooked(self) or trains_by_pytorch(self, x, self.qkv)

    def elsa_added(
        self,
        x: Tensor,
        residual: Tensor | None,
        scale: Tensor | None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """residual + scale * forward(x); the two are for calls without dropout."""
        gate = gate_of(self, x)
        q, k, v = split_packed(project(self, self.qkv, x), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        return attended(self, q, k, v, attn_mask, is_causal, gate, residual, scale)


class ElsaAttentionRope(AttentionRope):  # type: ignore[misc]  # timm is untyped
    """timm's attention with rotary positions: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = AttentionRope

    @all_tokens
    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        gate = gate_of(self, x)
        if self.qkv is not None:
            q, k, v = split_packed(project(self, self.qkv, x), self.num_heads)
        else:
            kv_heads = getattr(self, "num_kv_heads", None) or self.num_heads
            q = split_heads(project(self, self.q_proj, x), self.num_heads)
            k = split_heads(project(self, self.k_proj, x), kv_heads)
            v = split_heads(project(self, self.v_proj, x), kv_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(self, q, rope, v), rotate(self, k, rope, v)
        return attended(self, q, k, v, attn_mask, is_causal, gate)


def gate_of(module: Any, x: Tensor) -> Tensor | None:
    """The sigmoid gate on the output, [B, N, C], where the module has one."""
    gate = getattr(module, "gate", None)
    opening: Tensor | None = None if gate is None else gate(x).sigmoid()
    return opening


def rotate(module: Any, x: Tensor, rope: Tensor, like: Tensor) -> Tensor:
    """Rotate the tokens after the prefix (class and register tokens), in `like`'s dtype."""
    prefix, half = module.num_prefix_tokens, getattr(module, "rotate_half", False)
    rotated = apply_rot_embed_cat(x[:, :, prefix:, :], rope, half=half)
    return torch.cat([x[:, :, :prefix, :], rotated], dim=2).type_as(like)


def attended(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    gate: Tensor | None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """The operator and what timm does after it: join heads, norm, gate, projection, dropout.

    `residual` and `scale` are terms of `project`, for calls without dropout.
    """
    if isinstance(attn_mask, Packed):
        out = attend_packed(module, q, k, v, attn_mask, scale_of(module))
    else:
        out = attend(
            module, q, k, v, attn_mask, scale=scale_of(module), dropout_p=drop_p(module),
            is_causal=is_causal,
        )  # fmt: skip
    x = module.norm(join_heads(out))
    if gate is not None:
        x = x * gate
    out = project(module, module.proj, x, residual=residual, scale=scale)
    joined: Tensor = module.proj_drop(out)
    return joined
