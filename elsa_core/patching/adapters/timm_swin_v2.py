"""timm's Swin-V2 blocks, both implementations, on `elsa_core.window_attention`.

Read against timm 1.0.20 to 1.0.31. Queries and keys are normalised inside the operator. The bias
that a small network makes of the relative positions, the same for every image, is computed for the
weights as they are (`elsa_core.patching.adapters.derived`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from timm.models.swin_transformer_v2 import SwinTransformerV2Block, WindowAttention
from timm.models.swin_transformer_v2_cr import SwinTransformerV2CrBlock, WindowMultiHeadAttention
from torch import Tensor

from elsa_core.patching.adapters.common import project, project_by
from elsa_core.patching.adapters.derived import Derivation, Derives, derived
from elsa_core.patching.adapters.timm_swin import attend_block, differs
from elsa_core.patching.adapters.windows import (
    Bias,
    as_table,
    cosine_scale,
    cosine_table,
    keeps_original,
    must_call,
    of_padding,
    read_bias,
    why_not,
)


class ElsaSwinTransformerV2Block(Derives, SwinTransformerV2Block):  # type: ignore[misc]  # timm is untyped
    """Swin-V2's block, whose attention reads the projection of the whole image as it lies."""

    elsa_base = SwinTransformerV2Block
    elsa_attention = "attn"
    elsa_entry = "_attn"
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_not(module.attn, WindowAttention)

    def elsa_derivation(self) -> Derivation:
        """The position network's bias, the factors of the scores, and the projection's bias."""
        attn = self.attn
        tensors = (
            attn.relative_coords_table, attn.relative_position_index, attn.logit_scale,
            attn.q_bias, attn.k_bias, attn.v_bias,
        )  # fmt: skip
        return Derivation(self, attn, _terms, tensors, (attn.cpb_mlp,), per_call=_terms_of_table)

    def _attn(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, H, W, C]."""
        attn = self.attn
        called = must_call(attn, WindowAttention) or differs(self, x)
        if called or keeps_original(self, x, attn.qkv, attn.num_heads, self.window_size):
            out: Tensor = super()._attn(x)
            return out
        terms: _Terms = derived(self.elsa_derivation())
        bias = pad = terms.qkv_bias
        if bias is not None and not attn.qkv_bias_separate:
            qkv = project_by(self, x, attn.qkv.weight, bias)
        else:
            qkv, own = project(self, attn.qkv, x), of_padding(attn.qkv, x, self.window_size)
            qkv = qkv if bias is None else qkv + bias
            if own is not None:
                pad = own if bias is None else own + bias
        return attend_block(
            self,
            qkv,
            terms.bias.bias,
            bias_index=terms.bias.bias_index,
            pad_qkv=pad,
            logit_scale=terms.scale,
        )


class _Terms(NamedTuple):
    bias: Bias
    scale: Tensor  # [heads]
    qkv_bias: Tensor | None  # [3 * C]


def _terms(attn: Any) -> _Terms:
    tokens = math.prod(attn.window_size)
    bias = read_bias(cosine_table(attn), attn.relative_position_index, attn.num_heads, tokens)
    return _with_bias(attn, bias)


def _terms_of_table(attn: Any) -> _Terms:
    tokens = math.prod(attn.window_size)
    return _with_bias(attn, as_table(cosine_table(attn), attn.relative_position_index, tokens))


def _with_bias(attn: Any, bias: Bias) -> _Terms:
    qkv_bias = None
    if attn.q_bias is not None:
        qkv_bias = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    return _Terms(bias, cosine_scale(attn.logit_scale), qkv_bias)


class ElsaSwinTransformerV2CrBlock(Derives, SwinTransformerV2CrBlock):  # type: ignore[misc]
    """The other implementation's block (Christoph Reich's): a bias for each pair of tokens."""

    elsa_base = SwinTransformerV2CrBlock
    elsa_attention = "attn"
    elsa_entry = "_shifted_window_attn"
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_not(module.attn, WindowMultiHeadAttention)

    def elsa_derivation(self) -> Derivation:
        """The position network's bias and the factors of the scores."""
        attn = self.attn
        tensors = (attn.relative_coordinates_log, attn.logit_scale)
        return Derivation(self, attn, _pairwise_terms, tensors, (attn.meta_mlp,))

    def _shifted_window_attn(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, H, W, C]."""
        attn = self.attn
        called = must_call(attn, WindowMultiHeadAttention) or differs(self, x)
        if called or keeps_original(self, x, attn.qkv, attn.num_heads, self.window_size):
            out: Tensor = super()._shifted_window_attn(x)
            return out
        bias, scale = derived(self.elsa_derivation())
        return attend_block(
            self,
            project(self, attn.qkv, x),
            bias,
            pad_qkv=of_padding(attn.qkv, x, self.window_size),
            logit_scale=scale,
        )


def _pairwise_terms(attn: Any) -> tuple[Tensor, Tensor]:
    """The bias [heads, T, T] and the factors [heads]."""
    bias = attn._relative_positional_encodings().squeeze(0).contiguous()  # keys side by side
    return bias, cosine_scale(attn.logit_scale)
