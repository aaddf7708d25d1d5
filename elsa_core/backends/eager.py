"""Blockwise attention in plain PyTorch: any device, any floating dtype, differentiable.

It runs when no other backend can, serves float64, and holds the backward formula of every backend.
Keys are folded block by block with the monoid of `elsa_core.monoid`, so the forward needs memory
linear in the number of tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core import monoid
from elsa_core.backends.support import Request, Support

# Scores alive at once: 2**22 values are 16 MiB in float32, which stays near the last-level cache.
_SCORES_ALIVE = 1 << 22
_KEY_BLOCK = 1024
_QUERY_BLOCK_MIN = 16
# The relative error of exp(scores - lse) that is left to the rounding of a large lse.
_WEIGHT_ERROR = 2.0**-13


Result = TypeVar("Result")


def _without_autocast(kernel: Callable[..., Result]) -> Callable[..., Result]:
    """The caller's autocast must not reach the products inside: scores and sums stay wide."""

    @functools.wraps(kernel)
    def run(first: Tensor, *args: Any, **kwargs: Any) -> Result:
        with torch.autocast(first.device.type, enabled=False):
            return kernel(first, *args, **kwargs)

    return run


def support(request: Request) -> Support:
    """Every device and floating dtype; the arithmetic is PyTorch's own matrix product."""
    if not request.dtype.is_floating_point:
        return Support(False, f"eager attention needs a floating dtype, not {request.dtype}")
    if request.precision == "turbo":
        return Support(False, "eager attention has no turbo precision; it computes in full float32")
    return Support(True)


def schedule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    precision: str,
) -> str:
    """Name the blocks a call would be cut into."""
    block_q, block_k = _block_sizes(query, key)
    return f"query blocks of {block_q}, fold over key blocks of {block_k}"


@_without_autocast
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    precision: str = "strict",
    *,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Softmax attention as a fold over key blocks (ELSA, Eq. 4).

    Layouts are those of the operator `elsa::attention`: query [B, Hq, Nq, D], key [B, Hkv, Nk, D],
    value [B, Hkv, Nk, Dv], mask 4-D with dims full or 1. Scores, states and sums are float32, or
    float64 for float64 inputs. Dropout falls on the probabilities as in PyTorch: the normaliser S
    stays that of the full softmax.

    Returns:
        out [B, Hq, Nq, Dv] in the query's dtype, memory [B, Nq, Hq, Dv]; lse [B, Hq, Nq], float32
        or, for float64 inputs, float64.
    """
    batch, heads, query_length, _ = query.shape
    value_dim = value.shape[-1]
    compute = _compute_dtype(query.dtype)
    outputs, lses = [], []
    block_q, block_k = _block_sizes(query, key)
    for rows in _blocks(query_length, block_q):
        q = _grouped(query[:, :, rows].to(compute), key.shape[1])
        state = monoid.State.identity(q.shape[:-1], value_dim, dtype=compute, device=query.device)
        for columns in _blocks(_visible_keys(key, rows, is_causal), block_k):
            scores = _scores(q, key[:, :, columns], attn_mask, rows, columns, is_causal, scale)
            state = monoid.merge(state, _lift(scores, value[:, :, columns].to(compute), dropout_p))
        out, lse = monoid.finalize(state)
        outputs.append(out.flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    if not outputs:
        empty = query.new_zeros((batch, query_length, heads, value_dim)).transpose(1, 2)
        return empty, query.new_zeros((batch, heads, query_length), dtype=compute)
    out = torch.cat(outputs, dim=2).to(query.dtype)
    # The caller's next step is a transpose and a reshape: write the memory so that both are views.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, torch.cat(lses, dim=2)


@_without_autocast
def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by recomputing P from the saved lse, block by block: O(N) memory beyond the mask's.

    With P = exp(scores - lse) and delta = rowsum(grad_out * out) - grad_lse:
    dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q, dmask = dS.

    A large lse = m + log S has lost digits of log S (all of them at m = -1e9). Where one block
    holds all keys P is therefore their softmax; over more blocks m and S are computed again if any
    row asks for it, and P = exp(scores - m) / S.

    Returns:
        Gradients of query, key, value and mask (the mask's is empty where it is not needed).
    """
    compute = _compute_dtype(query.dtype)
    kv_heads = key.shape[1]
    grad_query = torch.zeros_like(query, dtype=compute)
    grad_key = torch.zeros_like(key, dtype=compute)
    grad_value = torch.zeros_like(value, dtype=compute)
    grad_mask = query.new_zeros(0)
    if attn_mask is not None and mask_needs_grad:
        grad_mask = torch.zeros_like(
            attn_mask, dtype=compute, memory_format=torch.contiguous_format
        )
    dead = lse.isneginf()
    lse = torch.where(dead, torch.inf, lse)  # exp(-inf - inf) = 0
    delta = (grad_out.to(compute) * out.to(compute)).sum(-1) - grad_lse
    block_q, block_k = _block_sizes(query, key)
    # Whether any row sees no key; only on the CPU does a look not wait for a queue.
    holes = attn_mask is not None and (dead.device.type != "cpu" or bool(dead.any()))
    again = key.shape[2] > block_k and _loses_digits(lse)
    for rows in _blocks(query.shape[2], block_q):
        q = _grouped(query[:, :, rows].to(compute), kv_heads)
        g_out = _grouped(grad_out[:, :, rows].to(compute), kv_heads)
        row_lse = _grouped(lse[:, :, rows, None], kv_heads)
        row_delta = _grouped(delta[:, :, rows, None], kv_heads)
        visible = _visible_keys(key, rows, is_causal)
        if again and visible > block_k:
            row_lse, total = _normaliser(q, key, attn_mask, rows, is_causal, scale, block_k)
            g_out, row_delta = g_out / total, row_delta / total  # P is linear in 1 / S
        for columns in _blocks(visible, block_k):
            k = key[:, :, None, columns].to(compute)
            v = value[:, :, None, columns].to(compute)
            scores = _scores(q, key[:, :, columns], attn_mask, rows, columns, is_causal, scale)
            if visible > block_k:
                p = (scores - row_lse).exp()
            else:
                p = scores.softmax(-1)
                if holes:
                    p = p.masked_fill(_grouped(dead[:, :, rows, None], kv_heads), 0.0)
            grad_value[:, :, columns] += (p.mT @ g_out).sum(2)
            g_scores = p * (g_out @ v.mT - row_delta)
            grad_query[:, :, rows] += (g_scores @ k).flatten(1, 2) * scale
            grad_key[:, :, columns] += (g_scores.mT @ q).sum(2) * scale
            if grad_mask.dim() == 4:
                _add_reduced(grad_mask, g_scores.flatten(1, 2), rows, columns)
    mask_dtype = query.dtype if attn_mask is None else attn_mask.dtype
    if grad_mask.dim() != 4:
        mask_dtype = query.dtype
    return (
        grad_query.to(query.dtype),
        grad_key.to(key.dtype),
        grad_value.to(value.dtype),
        grad_mask.to(mask_dtype),
    )


def _loses_digits(lse: Tensor) -> bool:
    """Whether the rounding of some finite lse shows in the weights."""
    if lse.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # a graph is recorded without values: be safe
    limit = _WEIGHT_ERROR / torch.finfo(lse.dtype).eps
    return bool(((lse.abs() > limit) & lse.isfinite()).any())


def _normaliser(
    q: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    rows: slice,
    is_causal: bool,
    scale: float,
    block_k: int,
) -> tuple[Tensor, Tensor]:
    """m and S of each row [B, Hkv, G, rows, 1]; infinity and 1 where a row sees no key."""
    state = monoid.State.identity(q.shape[:-1], 0, dtype=q.dtype, device=q.device)
    for columns in _blocks(_visible_keys(key, rows, is_causal), block_k):
        k = key[:, :, columns]
        scores = _scores(q, k, attn_mask, rows, columns, is_causal, scale)
        state = monoid.merge(state, _lift(scores, k[..., :0].to(q.dtype), 0.0))
    dead = state.m.isneginf()
    m = state.m.masked_fill(dead, torch.inf)
    return m[..., None], state.S.masked_fill(dead, 1.0)[..., None]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    _settle_exp(compute)
    return compute


@functools.cache
def _settle_exp(dtype: torch.dtype) -> None:
    """Take the first exp of the process on one thread.

    MKL picks the kernel of a vector function at its first call; where several threads make that
    call at once, one of them may run a kernel of half the digits (pytorch/pytorch issue 188792).
    """
    torch.exp(torch.zeros(1, dtype=dtype, device="cpu"))


def _block_sizes(query: Tensor, key: Tensor) -> tuple[int, int]:
    block_k = max(1, min(key.shape[2], _KEY_BLOCK))
    heads = max(1, query.shape[0] * query.shape[1])
    block_q = max(_QUERY_BLOCK_MIN, _SCORES_ALIVE // (heads * block_k))
    return min(block_q, max(1, query.shape[2])), block_k


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _visible_keys(key: Tensor, rows: slice, is_causal: bool) -> int:
    return min(key.shape[2], rows.stop) if is_causal else key.shape[2]


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, N, D] -> [B, Hkv, Hq / Hkv, N, D]: the queries that share a key head side by side."""
    grouped: Tensor = x.unflatten(1, (kv_heads, x.shape[1] // kv_heads if kv_heads else 1))
    return grouped


def _scores(
    q: Tensor,  # [B, Hkv, G, rows, D]
    k: Tensor,  # [B, Hkv, columns, D]
    attn_mask: Tensor | None,
    rows: slice,
    columns: slice,
    is_causal: bool,
    scale: float,
) -> Tensor:
    scores = (q @ k.unsqueeze(2).to(q.dtype).mT) * scale
    if attn_mask is not None:
        block = _mask_block(attn_mask, rows, columns)
        block = _grouped(block, k.shape[1]) if block.shape[1] > 1 else block.unsqueeze(1)
        if block.dtype == torch.bool:
            scores = scores.masked_fill(~block, -math.inf)
        else:
            scores = scores + block.to(scores.dtype)
    if is_causal and columns.stop - 1 > rows.start:
        row = torch.arange(rows.start, rows.stop, device=q.device)
        column = torch.arange(columns.start, columns.stop, device=q.device)
        scores = scores.masked_fill(column > row[:, None], -math.inf)
    return scores


def _mask_block(attn_mask: Tensor, rows: slice, columns: slice) -> Tensor:
    if attn_mask.shape[2] > 1:
        attn_mask = attn_mask[:, :, rows]
    return attn_mask[..., columns] if attn_mask.shape[3] > 1 else attn_mask


def _lift(scores: Tensor, value: Tensor, dropout_p: float) -> monoid.State:
    """Summarise one key block for every row at once: [B, Hkv, G, rows, n] and [B, Hkv, n, Dv]."""
    state = monoid.lift(scores, value[:, :, None, None])
    if not dropout_p:
        return state
    shift = torch.where(state.m.isneginf(), 0.0, state.m)[..., None]
    kept = F.dropout((scores - shift).exp(), dropout_p)
    return monoid.State(state.m, state.S, kept @ value.unsqueeze(2))


def _add_reduced(total: Tensor, block: Tensor, rows: slice, columns: slice) -> None:
    """Add a block of dS to the gradient of a mask whose dims of size 1 were broadcast."""
    target = _mask_block(total, rows, columns)
    target += block.sum_to_size(target.shape)
