"""torchvision's Swin attention, v1 and v2, on `elsa_core.window_attention`.

Read against torchvision 0.20 to 0.30. Unlike the paper's code it pads first and rolls the padded
image, and it does not shift an axis that one window covers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

from elsa_core.base import calls
from elsa_core.ops.window.api import window_attention
from elsa_core.patching.adapters.common import project_by
from elsa_core.patching.adapters.derived import Derivation, Derives, derived
from elsa_core.patching.adapters.windows import Bias, cosine_terms, keeps_original, read_bias


class _Shifted(Derives):
    """What the adapters share; their derivations give a bias, or `CosineTerms`."""

    def forward(self: Any, x: Tensor) -> Any:
        drops = self.training and self.attention_dropout > 0.0
        if drops or keeps_original(self, x, self, self.window_size):
            return self.elsa_base.forward(self, x)
        terms = derived(self.elsa_derivation())
        bias, scale, qkv_bias = (terms, None, self.qkv.bias) if isinstance(terms, Bias) else terms
        height, width = x.shape[1:3]
        rows, columns = self.window_size
        below, right = -height % rows, -width % columns
        axes = (self.window_size, (height + below, width + right), self.shift_size)
        shift = [0 if window >= size else by for window, size, by in zip(*axes, strict=True)]
        padded = any(shift) and (below > 0 or right > 0)
        if padded:  # the roll carries padding with it, unlike the operator's own
            x = F.pad(x, (0, 0, 0, right, 0, below))
        out = window_attention(
            project_by(self, x, self.qkv.weight, qkv_bias),
            bias.bias,
            bias_index=bias.bias_index,
            num_heads=self.num_heads,
            window_size=self.window_size,
            shift_size=shift,
            pad_qkv=qkv_bias if calls.traced() or below or right else None,
            logit_scale=scale,
            precision=self.elsa_precision,
            backend=self.elsa_backend,
        )
        if padded:
            out = out[:, :height, :width]
        joined = project_by(self, out, self.proj.weight, self.proj.bias)
        return F.dropout(joined, self.dropout, self.training)


class ElsaShiftedWindowAttention(_Shifted, ShiftedWindowAttention):  # type: ignore[misc]
    """Swin's attention of an image [B, H, W, C] -> [B, H, W, C], any floating dtype."""

    elsa_base = ShiftedWindowAttention

    def elsa_derivation(self) -> Derivation:
        table, index = self.relative_position_bias_table, self.relative_position_index
        return Derivation(self, self, partial(read_bias, table, index), (table, index))


class ElsaShiftedWindowAttentionV2(_Shifted, ShiftedWindowAttentionV2):  # type: ignore[misc]
    """Swin-V2's cosine attention of an image [B, H, W, C] -> [B, H, W, C], any floating dtype."""

    elsa_base = ShiftedWindowAttentionV2

    def elsa_derivation(self) -> Derivation:
        return cosine_terms(self, self, (self.qkv.bias,))
