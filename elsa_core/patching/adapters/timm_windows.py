"""Windows without shift in timm's Twins, DaViT, TinyViT and MaxViT (windows and grids alike) on
`elsa_core.window_attention`.

Read against timm 1.0.20 to 1.0.31. In maxxvit CoAtNet's global attention, the parallel block and
the blocks in channels-first layout call PyTorch's operator on partitioned tokens in their own
forward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.layers import RelPosBias
from timm.models.davit import SpatialBlock, WindowAttention
from timm.models.maxxvit import AttentionCl, PartitionAttentionCl
from timm.models.tiny_vit import Attention as TinyVitAttention
from timm.models.tiny_vit import TinyVitBlock
from timm.models.twins import LocallyGroupedAttn
from torch import Tensor

from elsa_core.patching.adapters.derived import Derivation, derived
from elsa_core.patching.adapters.windows import (
    Bias,
    WindowBlock,
    attend_windows,
    keeps_original,
    must_call,
    of_padding,
    read_bias,
)


class ElsaLocallyGroupedAttn(LocallyGroupedAttn):  # type: ignore[misc]  # timm is untyped
    """Twins' attention within groups: [B, H * W, C] -> [B, H * W, C]."""

    elsa_base = LocallyGroupedAttn

    def forward(self, x: Tensor, size: Any) -> Any:
        image, window = x.unflatten(1, tuple(size)), (self.ws, self.ws)
        if must_call(self, None) or keeps_original(self, x, self, window):
            return super().forward(x, size)
        pad = of_padding(self.qkv, image, window)
        return self.proj_drop(attend_windows(self, self, image, window, flat=True, pad_qkv=pad))


class ElsaSpatialBlock(WindowBlock, SpatialBlock):  # type: ignore[misc]  # timm is untyped
    """DaViT's block of window attention: [B, C, H, W] -> [B, C, H, W]."""

    elsa_base = SpatialBlock
    elsa_expects = WindowAttention

    def forward(self, x: Tensor) -> Any:
        attn, window = self.attn, self.window_size
        if must_call(attn, WindowAttention) or keeps_original(self, x, attn, window):
            return super().forward(x)
        tokens = self.cpe1(x).permute(0, 2, 3, 1)
        normed = self.norm1(tokens)
        pad = of_padding(attn.qkv, normed, window)
        out = attend_windows(self, attn, normed, window, pad_qkv=pad)
        tokens = tokens + self.drop_path1(out)
        x = self.cpe2(tokens.permute(0, 3, 1, 2))
        if self.mlp is None:
            return x
        tokens = x.permute(0, 2, 3, 1)
        tokens = tokens + self.drop_path2(self.mlp(self.norm2(tokens)))
        return tokens.permute(0, 3, 1, 2)


class ElsaTinyVitBlock(WindowBlock, TinyVitBlock):  # type: ignore[misc]  # timm is untyped
    """TinyViT's block of window attention: [B, H, W, C] -> [B, H, W, C]."""

    elsa_base = TinyVitBlock
    elsa_expects = TinyVitAttention

    @classmethod
    def elsa_why_not(cls, module: Any) -> str:
        attn = module.attn
        if type(attn) is TinyVitAttention and attn.val_dim != attn.key_dim:
            return "its values are of another width than its keys"
        return super().elsa_why_not(module)

    def elsa_derivation(self) -> Derivation:
        attn = self.attn
        table, index = attn.attention_biases, attn.attention_bias_idxs
        return Derivation(self, attn, partial(read_bias, table.t(), index), (table, index))

    def forward(self, x: Tensor) -> Any:
        attn, side = self.attn, self.window_size
        window = side, side
        if must_call(attn, TinyVitAttention) or keeps_original(self, x, attn, window):
            return super().forward(x)
        pad = None
        if x.shape[1] % side or x.shape[2] % side:  # a padded token goes through the norm too
            pad = attn.qkv(attn.norm(x.new_zeros(x.shape[-1])))
        bias = derived(self.elsa_derivation())
        out = attend_windows(self, attn, attn.norm(x), window, bias, pad_qkv=pad, layout="head")
        x = x + self.drop_path1(out)
        tokens = self.local_conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return tokens + self.drop_path2(self.mlp(tokens))


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

        def compute(dense: bool) -> Bias:
            if not dense and type(rel_pos) is RelPosBias:
                table, index = rel_pos.relative_position_bias_table, rel_pos.relative_position_index
                return read_bias(table, index, dense)
            bias: Tensor = rel_pos.get_bias()
            return Bias(bias.reshape(-1, *bias.shape[-2:]))

        return Derivation(self, attn, compute, (), (rel_pos,))

    def _partition_attn(self, x: Tensor) -> Any:
        attn, window = self.attn, self.partition_size
        # Sizes that do not divide are an error here, which the original words.
        uneven = x.shape[1] % window[0] or x.shape[2] % window[1]
        left = uneven or must_call(attn, AttentionCl)
        if left or keeps_original(self, x, attn, window):
            return super()._partition_attn(x)
        derivation = self.elsa_derivation()
        bias = None if derivation is None else derived(derivation)
        layout, grid = "head" if attn.head_first else "qkv", not self.partition_block
        out = attend_windows(self, attn, x, window, bias, layout=layout, grid=grid)
        return attn.proj_drop(out)
