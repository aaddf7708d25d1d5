"""Windows without shift in timm's Twins, DaViT and TinyViT on `elsa_core.window_attention`.

Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

from typing import Any

from timm.models.davit import SpatialBlock, WindowAttention
from timm.models.tiny_vit import Attention as TinyVitAttention
from timm.models.tiny_vit import TinyVitBlock
from timm.models.twins import LocallyGroupedAttn
from torch import Tensor

from elsa_core.patching.adapters.common import drop_p, project, scale_of
from elsa_core.patching.adapters.derived import Derivation, Derives, derived
from elsa_core.patching.adapters.windows import (
    Bias,
    as_table,
    attend_windows,
    has_hooked_parts,
    is_hooked,
    is_small,
    keeps_original,
    of_padding,
    read_bias,
    why_not,
)


class ElsaLocallyGroupedAttn(LocallyGroupedAttn):  # type: ignore[misc]  # timm is untyped
    """Twins' attention within groups: [B, H * W, C] -> [B, H * W, C]."""

    elsa_base = LocallyGroupedAttn
    elsa_precision: str
    elsa_backend: str

    def forward(self, x: Tensor, size: Any) -> Tensor:
        image = x.unflatten(1, tuple(size))
        terms = (self.qkv, self.num_heads, (self.ws, self.ws))
        left = has_hooked_parts(self) or keeps_original(self, x, *terms)
        if drop_p(self) > 0.0 or left:
            out: Tensor = super().forward(x, size)
            return out
        out = attend_windows(
            self,
            project(self, self.qkv, image),
            None,
            num_heads=self.num_heads,
            window_size=(self.ws, self.ws),
            scale=scale_of(self),
            pad_qkv=of_padding(self.qkv, image, (self.ws, self.ws)),
        )
        joined: Tensor = self.proj_drop(project(self, self.proj, out.flatten(1, 2)))
        return joined


class ElsaSpatialBlock(SpatialBlock):  # type: ignore[misc]  # timm is untyped
    """DaViT's block of window attention: [B, C, H, W] -> [B, C, H, W]."""

    elsa_base = SpatialBlock
    elsa_attention = "attn"
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_not(module.attn, WindowAttention)

    def forward(self, x: Tensor) -> Tensor:
        attn = self.attn
        called = is_hooked(attn, WindowAttention)
        if called or keeps_original(self, x, attn.qkv, attn.num_heads, self.window_size):
            out: Tensor = super().forward(x)
            return out
        tokens = self.cpe1(x).permute(0, 2, 3, 1)
        normed = self.norm1(tokens)
        out = attend_windows(
            self,
            project(self, attn.qkv, normed),
            None,
            num_heads=attn.num_heads,
            window_size=self.window_size,
            scale=scale_of(attn),
            pad_qkv=of_padding(attn.qkv, normed, self.window_size),
        )
        tokens = tokens + self.drop_path1(project(self, attn.proj, out))
        x = self.cpe2(tokens.permute(0, 3, 1, 2))
        if self.mlp is None:
            return x
        tokens = x.permute(0, 2, 3, 1)
        tokens = tokens + self.drop_path2(self.mlp(self.norm2(tokens)))
        image: Tensor = tokens.permute(0, 3, 1, 2)
        return image


class ElsaTinyVitBlock(Derives, TinyVitBlock):  # type: ignore[misc]  # timm is untyped
    """TinyViT's block of window attention: [B, H, W, C] -> [B, H, W, C]."""

    elsa_base = TinyVitBlock
    elsa_attention = "attn"
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        attn = module.attn
        if type(attn) is TinyVitAttention and attn.val_dim != attn.key_dim:
            return "its values are of another width than its keys"
        return why_not(attn, TinyVitAttention)

    def elsa_derivation(self) -> Derivation:
        """The relative position bias."""
        attn = self.attn
        table, index = attn.attention_biases, attn.attention_bias_idxs
        small = is_small(table, attn.num_heads, attn.attention_bias_idxs.shape[-1])
        return Derivation(
            self, attn, _learnt_bias, (table, index), per_call=_learnt_table, keep=small
        )

    def forward(self, x: Tensor) -> Tensor:
        attn, window = self.attn, self.window_size
        called = is_hooked(attn, TinyVitAttention)
        if called or keeps_original(self, x, attn.qkv, attn.num_heads, (window, window)):
            out: Tensor = super().forward(x)
            return out
        pad = None
        if x.shape[1] % window or x.shape[2] % window:  # a padded token goes through the norm too
            pad = attn.qkv(attn.norm(x.new_zeros(x.shape[-1])))
        bias: Bias = derived(self.elsa_derivation())
        out = attend_windows(
            self,
            project(self, attn.qkv, attn.norm(x)),
            bias.bias,
            bias_index=bias.bias_index,
            num_heads=attn.num_heads,
            window_size=(window, window),
            scale=scale_of(attn),
            pad_qkv=pad,
            layout="head",
        )
        x = x + self.drop_path1(project(self, attn.proj, out))
        tokens = self.local_conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        image: Tensor = tokens + self.drop_path2(self.mlp(tokens))
        return image


def _learnt_table(attn: Any) -> Bias:
    table, index = attn.attention_biases.t(), attn.attention_bias_idxs
    return as_table(table, index, attn.attention_bias_idxs.shape[-1])


def _learnt_bias(attn: Any) -> Bias:
    table, index = attn.attention_biases.t(), attn.attention_bias_idxs
    return read_bias(table, index, attn.num_heads, attn.attention_bias_idxs.shape[-1])
