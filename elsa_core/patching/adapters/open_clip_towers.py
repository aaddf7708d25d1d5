"""open_clip's own attention modules on `elsa_core.attention`.

Its towers of `nn.MultiheadAttention` are served by `torch_multihead`, its `Attention` by the
redirect; with scaled_cosine that one hands 4-D tensors to `torch.bmm` and raises by itself. Read
against open_clip 3.3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from open_clip.modified_resnet import AttentionPool2d
from torch import Tensor

from elsa_core.patching.adapters.common import attend, join_heads, split_heads


class ElsaAttentionPool2d(AttentionPool2d):  # type: ignore[misc]  # open_clip is untyped
    """The mean token attends to all, [B, C, H, W] -> [B, C']. The others' queries, which the
    original computes and drops, are left out."""

    elsa_base = AttentionPool2d
    elsa_precision: str
    elsa_backend: str

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([x.mean(dim=1, keepdim=True), x], dim=1)
        x = x + self.positional_embedding.to(x.dtype)
        q = split_heads(F.linear(x[:, :1], self.q_proj.weight, self.q_proj.bias), self.num_heads)
        k = split_heads(F.linear(x, self.k_proj.weight, self.k_proj.bias), self.num_heads)
        v = split_heads(F.linear(x, self.v_proj.weight, self.v_proj.bias), self.num_heads)
        out = attend(self, q, k, v)
        return F.linear(join_heads(out), self.c_proj.weight, self.c_proj.bias).squeeze(1)
