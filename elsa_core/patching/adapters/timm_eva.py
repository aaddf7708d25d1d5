"""timm's `EvaAttention` (EVA-02, DINOv3, Perception Encoder, ...) on `elsa_core.attention`.

Read against timm 1.0.20 (no is_causal, no gate), 1.0.29 and 1.0.31.
"""

from __future__ import annotations

import torch
from timm.models.eva import EvaAttention
from torch import Tensor

from elsa_core.patching.adapters.common import (
    all_tokens,
    project,
    project_by,
    split_heads,
    split_packed,
)
from elsa_core.patching.adapters.timm_attention import attended, gate_of, rotate


class ElsaEvaAttention(EvaAttention):  # type: ignore[misc]  # timm is untyped
    """EVA's attention, whose keys have no bias: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = EvaAttention

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
            q, k, v = split_packed(self._elsa_packed(x), self.num_heads)
        else:
            q = split_heads(project(self, self.q_proj, x), self.num_heads)
            k = split_heads(project(self, self.k_proj, x), self.num_heads)
            v = split_heads(project(self, self.v_proj, x), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(self, q, rope, v), rotate(self, k, rope, v)
        return attended(self, q, k, v, attn_mask, is_causal, gate)

    def _elsa_packed(self, x: Tensor) -> Tensor:
        """The packed projection [B, N, 3 * H * D] with the biases of queries and values."""
        if self.q_bias is None:
            return project(self, self.qkv, x)
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        if self.qkv_bias_separate:
            packed = project(self, self.qkv, x)
            packed += bias
            return packed
        return project_by(self, x, self.qkv.weight, bias)
