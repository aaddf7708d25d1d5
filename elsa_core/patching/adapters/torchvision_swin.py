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
from elsa_core.patching.adapters.windows import (
    Bias,
    attend_windows,
    cosine_scale,
    derived,
    read_bias,
)


class ElsaShiftedWindowAttention(ShiftedWindowAttention):  # type: ignore[misc]
    """Swin's attention of an image [B, H, W, C] -> [B, H, W, C], any floating dtype."""

    elsa_base = ShiftedWindowAttention
    elsa_precision: str
    elsa_backend: str

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.attention_dropout > 0.0:
            out: Tensor = super().forward(x)
            return out
        sources = (self.relative_position_bias_table, self.relative_position_index, self.qkv.bias)
        return _attended(self, x, derived(self, _terms, sources))


class ElsaShiftedWindowAttentionV2(ShiftedWindowAttentionV2):  # type: ignore[misc]
    """Swin-V2's cosine attention of an image [B, H, W, C] -> [B, H, W, C], any floating dtype."""

    elsa_base = ShiftedWindowAttentionV2
    elsa_precision: str
    elsa_backend: str

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.attention_dropout > 0.0:
            out: Tensor = super().forward(x)
            return out
        sources = (
            *self.cpb_mlp.parameters(), self.relative_coords_table, self.relative_position_index,
            self.logit_scale, self.qkv.bias,
        )  # fmt: skip
        return _attended(self, x, derived(self, _cosine_terms, sources))


class _Terms(NamedTuple):
    bias: Bias
    scale: Tensor | None  # [heads] in cosine attention
    qkv_bias: Tensor | None  # [3 * C]


def _terms(attn: Any) -> _Terms:
    return _Terms(_read(attn, attn.relative_position_bias_table), None, attn.qkv.bias)


def _cosine_terms(attn: Any) -> _Terms:
    table = attn.cpb_mlp(attn.relative_coords_table).view(-1, attn.num_heads)
    bias = attn.qkv.bias
    if bias is not None:  # keys have none
        q, k, v = bias.chunk(3)
        bias = torch.cat((q, torch.zeros_like(k), v))
    return _Terms(_read(attn, 16 * torch.sigmoid(table)), cosine_scale(attn.logit_scale), bias)


def _read(attn: Any, table: Tensor) -> Bias:
    tokens = math.prod(attn.window_size)
    return read_bias(table, attn.relative_position_index, attn.num_heads, tokens)


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
