"""timm's Swin blocks, of the first version and both implementations of the second, on
`elsa_core.window_attention`.

Read against timm 1.0.20 to 1.0.31. Window, shift and table are read at each call, so that
`set_input_size`, `always_partition` and a dynamic image size work on a patched model. The operator
knows the regions of a mask by their coordinates, and normalises queries and keys of Swin-V2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import swin_transformer, swin_transformer_v2
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2CrBlock, WindowMultiHeadAttention
from torch import Tensor

from elsa_core.patching.adapters.common import project, project_by
from elsa_core.patching.adapters.derived import Derivation, derived
from elsa_core.patching.adapters.windows import (
    Bias,
    CosineTerms,
    WindowBlock,
    attend_windows,
    cosine_scale,
    cosine_terms,
    keeps_original,
    must_call,
    of_padding,
    read_bias,
)


class _SwinBlock(WindowBlock):
    """A Swin block, whose attention reads the projection of the whole image as it lies; it derives
    a bias, or `CosineTerms`."""

    elsa_entry = "_attn"

    def _attn(self: Any, x: Tensor) -> Any:
        attn, window = self.attn, self.window_size
        called = must_call(attn, self.elsa_expects) or _differs(self, x)
        if called or keeps_original(self, x, attn, window):
            return getattr(self.elsa_base, self.elsa_entry)(self, x)
        found = derived(self.elsa_derivation())
        pairs, scale, bias = (found, None, None) if isinstance(found, Bias) else found
        pad: Tensor | None
        if bias is not None and not attn.qkv_bias_separate:
            qkv, pad = project_by(self, x, attn.qkv.weight, bias), bias
        else:
            qkv, pad = project(self, attn.qkv, x), of_padding(attn.qkv, x, window)
            if bias is not None:
                qkv, pad = qkv + bias, bias if pad is None else pad + bias
        out = attend_windows(
            self, attn, x, window, pairs, qkv=qkv, pad_qkv=pad, shift_size=self.shift_size,
            logit_scale=scale,
        )  # fmt: skip
        return attn.proj_drop(out)


class ElsaSwinTransformerBlock(_SwinBlock, SwinTransformerBlock):  # type: ignore[misc]  # timm is untyped
    """Swin's block."""

    elsa_base = SwinTransformerBlock
    elsa_expects = swin_transformer.WindowAttention

    def elsa_derivation(self) -> Derivation:
        attn = self.attn
        table, index = attn.relative_position_bias_table, attn.relative_position_index
        return Derivation(self, attn, partial(read_bias, table, index), (table, index))


class ElsaSwinTransformerV2Block(_SwinBlock, SwinTransformerV2Block):  # type: ignore[misc]
    """Swin-V2's block."""

    elsa_base = SwinTransformerV2Block
    elsa_expects = swin_transformer_v2.WindowAttention

    def elsa_derivation(self) -> Derivation:
        attn = self.attn
        return cosine_terms(self, attn, (attn.q_bias, attn.k_bias, attn.v_bias))


class ElsaSwinTransformerV2CrBlock(_SwinBlock, SwinTransformerV2CrBlock):  # type: ignore[misc]
    """The other implementation's block (Christoph Reich's): a bias for each pair of tokens."""

    elsa_base = SwinTransformerV2CrBlock
    elsa_expects = WindowMultiHeadAttention
    elsa_entry = "_shifted_window_attn"
    _shifted_window_attn = _SwinBlock._attn

    def elsa_derivation(self) -> Derivation:
        attn = self.attn

        def compute(dense: bool) -> CosineTerms:
            pairs = attn._relative_positional_encodings().squeeze(0)  # [heads, T, T]
            return CosineTerms(Bias(pairs.contiguous()), cosine_scale(attn.logit_scale), None)

        tensors = (attn.relative_coordinates_log, attn.logit_scale)
        return Derivation(self, attn, compute, tensors, (attn.meta_mlp,))


def _differs(block: Any, x: Tensor) -> bool:
    """Whether a Swin block has other windows than its attention, or a mask of another shift or of
    other windows than those of x [B, H, W, C], which the original applies."""
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
