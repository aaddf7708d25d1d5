"""timm's MaxViT partition blocks, windows and grids alike, on `elsa_core.window_attention`.

Read against timm 1.0.20 to 1.0.31. CoAtNet's global attention, the parallel block and the blocks in
channels-first layout call PyTorch's operator on partitioned tokens and are redirected there.
"""

from __future__ import annotations

from typing import Any

from timm.models.maxxvit import AttentionCl, PartitionAttentionCl
from torch import Tensor

from elsa_core.patching.adapters.common import project
from elsa_core.patching.adapters.windows import attend_windows, derived, must_call, why_not


class ElsaPartitionAttentionCl(PartitionAttentionCl):  # type: ignore[misc]  # timm is untyped
    """MaxViT's block of window or grid attention, which reads the projection as it lies."""

    elsa_base = PartitionAttentionCl
    elsa_attention = "attn"
    elsa_entry = "_partition_attn"
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_not(module.attn, AttentionCl)

    def _partition_attn(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, H, W, C]."""
        attn = self.attn
        rows, columns = self.partition_size
        # Sizes that do not divide are an error here, which the original words.
        if must_call(attn, AttentionCl) or x.shape[1] % rows or x.shape[2] % columns:
            out: Tensor = super()._partition_attn(x)
            return out
        rel_pos, bias = attn.rel_pos, None
        if rel_pos is not None:
            bias = derived(rel_pos, _bias, (*rel_pos.parameters(), *rel_pos.buffers()))
        out = attend_windows(
            self,
            project(self, attn.qkv, x),
            bias,
            num_heads=attn.num_heads,
            window_size=self.partition_size,
            scale=attn.scale,
            layout="head" if attn.head_first else "qkv",
            grid=not self.partition_block,
        )
        joined: Tensor = attn.proj_drop(project(self, attn.proj, out))
        return joined


def _bias(rel_pos: Any) -> Tensor:
    """[heads, T, T] of any of timm's modules of relative positions."""
    bias: Tensor = rel_pos.get_bias()
    return bias.reshape(-1, *bias.shape[-2:])
