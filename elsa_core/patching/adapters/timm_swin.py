"""timm's Swin block on `elsa_core.window_attention`.

Read against timm 1.0.20 to 1.0.31. Window, shift and table are read at each call, so that
`set_input_size`, `always_partition` and a dynamic image size work on a patched model. The block's
`attn_mask` stays a buffer and is not read: the operator knows the regions by their coordinates.
"""

from __future__ import annotations

import math
from typing import Any

from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from torch import Tensor

from elsa_core.patching.adapters.common import project, scale_of
from elsa_core.patching.adapters.derived import Derivation, Derives, derived
from elsa_core.patching.adapters.windows import (
    Bias,
    as_table,
    attend_windows,
    is_small,
    keeps_original,
    must_call,
    of_padding,
    read_bias,
    why_not,
)


class ElsaSwinTransformerBlock(Derives, SwinTransformerBlock):  # type: ignore[misc]  # timm is untyped
    """Swin's block, whose attention reads the projection of the whole image as it lies."""

    elsa_base = SwinTransformerBlock
    elsa_attention = "attn"
    elsa_entry = "_attn"
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_not(module.attn, WindowAttention)

    def elsa_derivation(self) -> Derivation:
        """The relative position bias."""
        attn = self.attn
        table, index = attn.relative_position_bias_table, attn.relative_position_index
        small = is_small(table, attn.num_heads, math.prod(attn.window_size))
        return Derivation(self, attn, _bias, (table, index), per_call=_table, keep=small)

    def _attn(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, H, W, C]."""
        attn = self.attn
        called = must_call(attn, WindowAttention) or differs(self, x)
        if called or keeps_original(self, x, attn.qkv, attn.num_heads, self.window_size):
            out: Tensor = super()._attn(x)
            return out
        bias: Bias = derived(self.elsa_derivation())
        return attend_block(
            self,
            project(self, attn.qkv, x),
            bias.bias,
            bias_index=bias.bias_index,
            scale=scale_of(attn),
            pad_qkv=of_padding(attn.qkv, x, self.window_size),
        )


def differs(block: Any, x: Tensor) -> bool:
    """Whether a Swin block, of any version, has other windows than its attention, or a mask of
    another shift or of other windows than those of x [B, H, W, C], which the original applies.
    """
    if tuple(block.window_size) != tuple(block.attn.window_size):
        return True
    if getattr(block, "dynamic_mask", False):
        return False
    shifted = any(block.shift_size)
    if not shifted or block.attn_mask is None:
        return shifted == (block.attn_mask is None)
    made = zip(block.shift_size, block.window_size, block.target_shift_size, strict=True)
    if any(shift not in (0, window // 2, target) for shift, window, target in made):
        return True  # changed since the mask was made
    if not isinstance(x, Tensor):
        return True
    size = block.feat_size if hasattr(block, "feat_size") else block.input_resolution
    axes = zip(x.shape[1:3], size, block.window_size, strict=True)
    return any(-(-given // window) != -(-held // window) for given, held, window in axes)


def _bias(attn: Any) -> Bias:
    table, index = attn.relative_position_bias_table, attn.relative_position_index
    return read_bias(table, index, attn.num_heads, math.prod(attn.window_size))


def _table(attn: Any) -> Bias:
    table, index = attn.relative_position_bias_table, attn.relative_position_index
    return as_table(table, index, math.prod(attn.window_size))


def attend_block(block: Any, qkv: Tensor, bias: Tensor | None, **terms: Any) -> Tensor:
    """What a Swin block, of either version, makes of a projection [B, H, W, 3 * C]: [B, H, W, C].

    Window, shift and heads are the block's and its attention's own, as is the last projection.
    """
    attn = block.attn
    out = attend_windows(
        block,
        qkv,
        bias,
        num_heads=attn.num_heads,
        window_size=block.window_size,
        shift_size=block.shift_size,
        **terms,
    )
    joined: Tensor = attn.proj_drop(project(block, attn.proj, out))
    return joined
