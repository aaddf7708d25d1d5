"""Entmax attention in operations that exporters and `torch.func` know, for any length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from elsa_core.backends import eager_entmax
from elsa_core.backends.eager_entmax import Solved
from elsa_core.ops.attention import portable

# Steps of the solver, by whether alpha <= 2: there rows of random scores were seen to take ten at
# most in float32; above it bisections take part.
_STEPS = {True: 20, False: 60}


def entmax_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, head_alpha: Tensor | None,
    alpha: float, is_causal: bool, scale: float, precision: str = "strict",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """All scores at once, a fixed number of steps, and the formulas of autograd.

    The slope comes out of the solver without a derivative. Two steps of Newton's method that are
    differentiated give it its first and second derivatives.

    Returns:
        out, and rows and tiles as empty tensors [0].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
    if not key.shape[2]:
        # zeros that depend on the operands, as autograd has to find them
        return (scores @ value.to(wide)).to(query.dtype), query.new_empty(0), query.new_empty(0)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(wide)
    a: Tensor | float = max(alpha - 1.0, eager_entmax._LEAST)
    if head_alpha is not None:
        a = eager_entmax._checked(head_alpha.to(wide))
    few = head_alpha is None and alpha <= 2
    detached = a.detach() if isinstance(a, Tensor) else a
    found = eager_entmax.solve(scores.detach(), detached, _STEPS[few])
    weights = _weights(scores, found, a)
    out = (weights @ value.to(wide)).to(query.dtype)
    return out, query.new_empty(0), query.new_empty(0)


def entmax_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    head_alpha: Tensor | None, longest_q: int, longest_k: int, alpha: float, is_causal: bool,
    scale: float, precision: str = "strict",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`elsa::entmax_varlen_attention`: every pair of tokens, under a mask of their sequences.

    Returns:
        out, and rows and tiles as empty tensors [0].
    """
    tokens = query.shape[0], key.shape[0]
    seen, rows = portable.within(cu_seqlens_q, cu_seqlens_k, *tokens, is_causal)
    if head_alpha is not None and head_alpha.shape[0] > 1:
        head_alpha = head_alpha[rows, :, :, 0].permute(2, 1, 0).unsqueeze(-1)  # [1, H, T, 1]
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    out, *_ = entmax_attention(q, k, v, seen, head_alpha, alpha, False, scale, precision)
    return out.squeeze(0).transpose(0, 1), query.new_empty(0), query.new_empty(0)


def _weights(scores: Tensor, found: Solved, a: Tensor | float) -> Tensor:
    """The weights, differentiable in the scores and in a.

    A hidden or empty score is replaced by 0 before anything is computed of it, so that no
    derivative meets an infinity.
    """
    v = eager_entmax.powers(scores.detach(), found, a if not isinstance(a, Tensor) else a.detach())[
        0
    ]
    alive = (v > 0) & (scores.detach() > -math.inf)
    top = found.top.masked_fill(found.top == -math.inf, 0.0)
    x = torch.where(alive, scores - top, 0.0)
    c = (a.detach() if isinstance(a, Tensor) else a) / found.slope
    for _ in range(2):
        z, y, _ = _sums(x, alive, c, a)
        c = c - z / y * (c - z ** (-a if isinstance(a, Tensor) else -float(a)))
    z, _, r = _sums(x, alive, c, a)
    return r / z


def _sums(x: Tensor, alive: Tensor, c: Tensor, a: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Z, Y and r; 1, 1 and zeros in a row without a key."""
    bent = torch.where(alive, x * (a / c), 0.0)
    r = torch.where(alive, torch.exp(torch.log1p(bent) / a), 0.0)
    dead = ~alive.any(-1, keepdim=True)
    y = (r / (1.0 + bent)).sum(-1, keepdim=True).masked_fill(dead, 1.0)
    return r.sum(-1, keepdim=True).masked_fill(dead, 1.0), y, r
