"""The operators in operations that other tools translate: what `torch.onnx.export` is given.

torch.onnx, and what reads its graphs (TensorRT, OpenVINO), know PyTorch's operators but none of
elsa's. While such a graph is made, calls are written with these: whole rows, no blocks and no loop
over lengths, so that an open batch stays open.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core.backends import eager_window
from elsa_core.backends.window_call import WindowCall


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str = "strict", *, with_lse: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`elsa::attention` by PyTorch's own operator, which every exporter knows.

    A row that sees no key gives zeros, also where a tool's softmax makes NaN of it. The lse takes
    all scores; it is empty [0] where it is not asked for.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mask = attn_mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, scale=scale)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        none = ~mask.any(-1, True) if boolean else mask.amax(-1, True) == -math.inf
        out = out.masked_fill(none, 0.0)
    if not with_lse:
        return out, query.new_empty(0)
    return out, scores_of(query, key, attn_mask, is_causal, scale).logsumexp(-1)


def scores_of(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """All scores of as many heads, float32 or wider, -inf where a key is not seen."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    is_causal: bool, scale: float, precision: str = "strict",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`elsa::varlen_attention` as attention over all tokens with a mask of their sequences.

    The mask is [T, Tk], and every pair of tokens is computed: what packing saves is lost, and a
    graph holds no loop over lengths.
    """
    seen, _ = within(cu_seqlens_q, cu_seqlens_k, query.shape[0], key.shape[0], is_causal)
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    out, lse = attention(q, k, v, seen, False, scale)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0)


def within(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, queries: int, keys: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Which of all tokens see each other, bool [1, 1, T, Tk], and the sequence of each query."""
    found = []
    for ends, tokens in ((cu_seqlens_q, queries), (cu_seqlens_k, keys)):
        token = torch.arange(tokens, device=ends.device)
        sequence = (token.unsqueeze(1) >= ends[1:].unsqueeze(0)).sum(1)
        found.append((sequence, token - ends[sequence]))
    (rows, row), (columns, column) = found
    seen = rows.unsqueeze(1) == columns.unsqueeze(0)
    if is_causal:
        seen = seen & (row.unsqueeze(1) >= column.unsqueeze(0))
    return seen.unsqueeze(0).unsqueeze(0), rows


def window_attention(*arguments: Any) -> Tensor:
    """`elsa::window_attention`: roll, cut, attend in float32 or wider, join, roll back."""
    call = WindowCall(*arguments)
    qkv, bias, heads = call.qkv, call.bias, call.num_heads
    first = call.layout == "qkv"
    cut = eager_window.Windows(qkv.shape[1:4], call.window_size, call.shift_size, call.grid)
    windows = eager_window.partition(qkv, cut, call.pad_qkv)
    count, tokens, channels = math.prod(cut.counts), windows.shape[1], qkv.shape[-1] // 3
    wide = torch.promote_types(qkv.dtype, torch.float32)
    order = (3, heads) if first else (heads, 3)
    head_dim = channels // heads
    apart = windows.to(wide).reshape(-1, count, tokens, *order, head_dim)
    parts = apart.unbind(3 if first else 4)
    q, k, v = (part.transpose(2, 3) for part in parts)  # [B, count, heads, tokens, head_dim]
    if call.logit_scale is None:
        scores = q @ k.transpose(-2, -1) * call.scale
    else:
        q, k = (F.normalize(part, dim=-1) for part in (q, k))
        scores = q @ k.transpose(-2, -1) * call.logit_scale.to(wide).view(-1, 1, 1)
    if bias is not None:
        scores = scores + eager_window.dense_bias(bias, call.bias_index).to(wide)
    mask = eager_window.region_mask(cut, call.mask_value, scores)
    if mask is not None:
        scores = scores + mask.unsqueeze(1)
    weights = scores.softmax(-1)
    if bias is not None:
        weights = weights.masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
    out = (weights @ v).transpose(2, 3).reshape(-1, tokens, channels).to(qkv.dtype)
    return eager_window.reverse(out, cut, qkv.shape[0])
