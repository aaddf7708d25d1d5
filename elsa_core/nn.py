"""Layers made of this package's operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elsa_core.errors import ArgumentError
from elsa_core.ops.entmax.api import LEAST_ALPHA, MOST_ALPHA, entmax_attention


class EntmaxAttention(nn.Module):
    """Self-attention of a vision transformer with alpha-entmax weights: [B, N, dim] -> the same.

    A replacement of timm's `Attention`: the names and shapes of its parameters, so that its weights
    load, and the signature of its forward.

    Args:
        dim: channels; a multiple of num_heads.
        num_heads: heads.
        qkv_bias, proj_bias: whether the projections have a bias.
        alpha: a number in [1, 4], or "learned": one for each head, 1 + sigmoid(alpha_logit), which
            begins at 1.5 and lies between softmax (1) and sparsemax (2).
        device, dtype: of the parameters.

    Raises:
        ArgumentError: dim is no multiple of num_heads, or alpha is neither.

    Source: Correia, Niculae and Martins, arXiv 1909.00015, Sec. 3.2 (alpha of heads).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        *,
        alpha: float | str = 1.5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ArgumentError(f"dim={dim} must be a multiple of num_heads={num_heads}")
        learned = alpha == "learned"
        if not learned and (isinstance(alpha, str) or not LEAST_ALPHA <= alpha <= MOST_ALPHA):
            raise ArgumentError(f"alpha={alpha!r} must be a number in [1, 4] or 'learned'")
        self.num_heads = num_heads
        self.fixed_alpha = 0.0 if isinstance(alpha, str) else float(alpha)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        logit = torch.zeros(num_heads, device=device, dtype=dtype) if learned else None
        self.alpha_logit = None if logit is None else nn.Parameter(logit)

    @property
    def alpha(self) -> float | Tensor:
        """The number, or of each head [num_heads, 1, 1], differentiable."""
        if self.alpha_logit is None:
            return self.fixed_alpha
        return 1.0 + self.alpha_logit.sigmoid()[:, None, None]

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q, k, v = self.split(x)
        out = entmax_attention(q, k, v, attn_mask, alpha=self.alpha, is_causal=is_causal)
        joined: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return joined

    def weights(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """The attention weights of x [B, N, dim]: [B, num_heads, N, N], all in memory."""
        q, k, _ = self.split(x)
        tokens = x.shape[1]
        one = torch.eye(tokens, device=x.device, dtype=x.dtype)
        values = one.expand(*q.shape[:2], tokens, tokens)
        return entmax_attention(q, k, values, attn_mask, alpha=self.alpha)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value [B, num_heads, N, head_dim], views of the packed projection."""
        packed = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        return q, k, v

    def extra_repr(self) -> str:
        alpha = "learned" if self.alpha_logit is not None else self.fixed_alpha
        return f"num_heads={self.num_heads}, alpha={alpha}"
