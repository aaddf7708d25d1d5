"""torchvision's Swin attention, v1 and v2, on `elsa_core.window_attention`.

Read against torchvision 0.20 to 0.30. Unlike the paper's code it pads first and rolls the padded
image, and it does not shift an axis that one window covers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

from elsa_core.patching.adapters.common import project_by
from elsa_core.patching.adapters.derived import Derivation, Derives, derived
from elsa_core.patching.adapters.windows import (
    Bias,
    as_table,
    attend_windows,
    cosine_scale,
    cosine_table,
    is_small,
    keeps_original,
    read_bias,
)


class ElsaShiftedWindowAttention(Derives, ShiftedWindowAttention):  # type: ignore[misc]
    """Swin's attention of an image [B, H, W, C] -> [B, H, W, C], any floating dtype."""

    elsa_base = ShiftedWindowAttention
    elsa_precision: str
    elsa_backend: str

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.training and self.attention_dropout > 0.0
        if dropped or keeps_original(self, x, self.qkv, self.num_heads, self.window_size):
            out: Tensor = super().forward(x)
            return out
        terms = _Terms(derived(self.elsa_derivation()), None, self.qkv.bias)
        return _attended(self, x, terms)

    def elsa_derivation(self) -> Derivation:
        """The relative position bias."""
        table, index = self.relative_position_bias_table, self.relative_position_index
        small = is_small(table, self.num_heads, math.prod(self.window_size))
        return Derivation(self, self, _bias, (table, index), per_call=_table, keep=small)


class ElsaShiftedWindowAttentionV2(Derives, ShiftedWindowAttentionV2):  # type: ignore[misc]
    """Swin-V2's cosine attention of an image [B, H, W, C] -> [B, H, W, C], any floating dtype."""

    elsa_base = ShiftedWindowAttentionV2
    elsa_precision: str
    elsa_backend: str

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.training and self.attention_dropout > 0.0
        if dropped or keeps_original(self, x, self.qkv, self.num_heads, self.window_size):
            out: Tensor = super().forward(x)
            return out
        return _attended(self, x, derived(self.elsa_derivation()))

    def elsa_derivation(self) -> Derivation:
        """The position network's bias, the factors of the scores, and the projection's bias."""
        tensors = (
            self.relative_coords_table, self.relative_position_index, self.logit_scale,
            self.qkv.bias,
        )  # fmt: skip
        return Derivation(
            self, self, _cosine_terms, tensors, (self.cpb_mlp,), per_call=_cosine_terms_of_table
        )


class _Terms(NamedTuple):
    bias: Bias
    scale: Tensor | None  # [heads] in cosine attention
    qkv_bias: Tensor | None  # [3 * C]


def _bias(attn: Any) -> Bias:
    return _read(attn, attn.relative_position_bias_table)


def _table(attn: Any) -> Bias:
    return _unread(attn, attn.relative_position_bias_table)


def _cosine_terms(attn: Any) -> _Terms:
    return _with_bias(attn, _read(attn, cosine_table(attn)))


def _cosine_terms_of_table(attn: Any) -> _Terms:
    return _with_bias(attn, _unread(attn, cosine_table(attn)))


def _with_bias(attn: Any, read: Bias) -> _Terms:
    bias = attn.qkv.bias
    if bias is not None:  # keys have none
        q, k, v = bias.chunk(3)
        bias = torch.cat((q, torch.zeros_like(k), v))
    return _Terms(read, cosine_scale(attn.logit_scale), bias)


def _read(attn: Any, table: Tensor) -> Bias:
    tokens = math.prod(attn.window_size)
    return read_bias(table, attn.relative_position_index, attn.num_heads, tokens)


def _unread(attn: Any, table: Tensor) -> Bias:
    return as_table(table, attn.relative_position_index, math.prod(attn.window_size))


def _attended(attn: Any, x: Tensor, terms: _Terms) -> Tensor:
    height, width = x.shape[1:3]
    rows, columns = attn.window_size
    below, right = -height % rows, -width % columns
    shift = [
        0 if window >= size else shift
        for window, size, shift in zip(
            attn.window_size, (height + below, width + right), attn.shift_size, strict=True
        )
    ]
    padded = any(shift) and (below > 0 or right > 0)
    if padded:  # the roll carries padding with it, unlike the operator's own
        x = F.pad(x, (0, 0, 0, right, 0, below))
    out = attend_windows(
        attn,
        project_by(attn, x, attn.qkv.weight, terms.qkv_bias),
        terms.bias.bias,
        bias_index=terms.bias.bias_index,
        num_heads=attn.num_heads,
        window_size=attn.window_size,
        shift_size=shift,
        pad_qkv=terms.qkv_bias,
        logit_scale=terms.scale,
    )
    if padded:
        out = out[:, :height, :width]
    joined = project_by(attn, out, attn.proj.weight, attn.proj.bias)
    return F.dropout(joined, attn.dropout, attn.training)
