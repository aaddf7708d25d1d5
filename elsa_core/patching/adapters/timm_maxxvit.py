"""timm's MaxViT partition blocks, windows and grids alike, on `elsa_core.window_attention`.

Read against timm 1.0.20 to 1.0.31. CoAtNet's global attention, the parallel block and the blocks in
channels-first layout call PyTorch's operator on partitioned tokens in their own forward.
"""

from __future__ import annotations

from typing import Any

from timm.layers import RelPosBias
from timm.models.maxxvit import AttentionCl, PartitionAttentionCl
from torch import Tensor

from elsa_core.patching.adapters.derived import Derivation, derived
from elsa_core.patching.adapters.windows import (
    Bias,
    WindowBlock,
    attend_windows,
    keeps_original,
    must_call,
    read_bias,
)


class ElsaPartitionAttentionCl(WindowBlock, PartitionAttentionCl):  # type: ignore[misc]  # timm is untyped
    """MaxViT's block of window or grid attention, which reads the projection as it lies."""

    elsa_base = PartitionAttentionCl
    elsa_expects = AttentionCl
    elsa_entry = "_partition_attn"

    def elsa_derivation(self) -> Derivation | None:
        """The bias of any of timm's modules of relative positions."""
        attn, rel_pos = self.attn, self.attn.rel_pos
        if rel_pos is None:
            return None

        def table() -> Bias:
            table, index = rel_pos.relative_position_bias_table, rel_pos.relative_position_index
            return read_bias(table, index, False)

        def dense() -> Bias:
            bias: Tensor = rel_pos.get_bias()
            return Bias(bias.reshape(-1, *bias.shape[-2:]))

        per_call = table if type(rel_pos) is RelPosBias else None
        return Derivation(self, attn, dense, (), (rel_pos,), per_call)

    def _partition_attn(self, x: Tensor) -> Any:
        attn, window = self.attn, self.partition_size
        # Sizes that do not divide are an error here, which the original words.
        uneven = x.shape[1] % window[0] or x.shape[2] % window[1]
        left = uneven or must_call(attn, AttentionCl)
        if left or keeps_original(self, x, attn.qkv, attn.num_heads, window):
            return super()._partition_attn(x)
        derivation = self.elsa_derivation()
        bias = None if derivation is None else derived(derivation)
        layout, grid = "head" if attn.head_first else "qkv", not self.partition_block
        out = attend_windows(self, attn, x, window, bias, layout=layout, grid=grid)
        return attn.proj_drop(out)
