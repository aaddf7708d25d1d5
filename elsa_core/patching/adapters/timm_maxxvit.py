"""timm's MaxViT partition blocks, windows and grids alike, on `elsa_core.window_attention`.

Read against timm 1.0.20 to 1.0.31. CoAtNet's global attention, the parallel block and the blocks in
channels-first layout call PyTorch's operator on partitioned tokens in their own forward.
"""

from __future__ import annotations

from typing import Any

from timm.layers import RelPosBias
from timm.models.maxxvit import AttentionCl, PartitionAttentionCl
from torch import Tensor

from elsa_core.patching.adapters.common import project, scale_of
from elsa_core.patching.adapters.derived import Derivation, Derives, derived
from elsa_core.patching.adapters.windows import (
    Bias,
    as_table,
    attend_windows,
    keeps_original,
    must_call,
    why_not,
)


class ElsaPartitionAttentionCl(Derives, PartitionAttentionCl):  # type: ignore[misc]  # timm is untyped
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

    def elsa_derivation(self) -> Derivation | None:
        """The relative position bias."""
        attn = self.attn
        if attn.rel_pos is None:
            return None
        per_call = _table if type(attn.rel_pos) is RelPosBias else None
        return Derivation(self, attn, _bias, (), (attn.rel_pos,), per_call)

    def _partition_attn(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, H, W, C]."""
        attn = self.attn
        rows, columns = self.partition_size
        # Sizes that do not divide are an error here, which the original words.
        uneven = x.shape[1] % rows or x.shape[2] % columns
        left = uneven or must_call(attn, AttentionCl)
        if left or keeps_original(self, x, attn.qkv, attn.num_heads, self.partition_size):
            out: Tensor = super()._partition_attn(x)
            return out
        derivation = self.elsa_derivation()
        bias = Bias(None, None) if derivation is None else derived(derivation)
        out = attend_windows(
            self,
            project(self, attn.qkv, x),
            bias.bias,
            bias_index=bias.bias_index,
            num_heads=attn.num_heads,
            window_size=self.partition_size,
            scale=scale_of(attn),
            layout="head" if attn.head_first else "qkv",
            grid=not self.partition_block,
        )
        joined: Tensor = attn.proj_drop(project(self, attn.proj, out))
        return joined


def _bias(attn: Any) -> Bias:
    """[heads, T, T] of any of timm's modules of relative positions."""
    bias: Tensor = attn.rel_pos.get_bias()
    return Bias(bias.reshape(-1, *bias.shape[-2:]), None)


def _table(attn: Any) -> Bias:
    """Of timm's plain module of relative positions."""
    rel_pos = attn.rel_pos
    return as_table(
        rel_pos.relative_position_bias_table, rel_pos.relative_position_index, rel_pos.window_area
    )
