"""Blockwise attention in plain PyTorch: any device, any floating dtype, differentiable.

It runs when no other backend can, serves float64, and holds the backward formula of every backend.
Keys are folded block by block with the monoid of `elsa_core.monoid`, so the forward needs memory
linear in the number of tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core import monoid
from elsa_core.backends import philox
from elsa_core.backends.partition import Partition, RoundTrip
from elsa_core.backends.support import Request, Support, loses_digits
from elsa_core.base.skipping import COUNTS, exact_threshold

# Scores alive at once: 2**22 values are 16 MiB in float32, which stays near the last-level cache.
SCORES_ALIVE = 1 << 22
_KEY_BLOCK = 1024
_QUERY_BLOCK_MIN = 16
_TILE = 64  # queries and keys of a tile that may be left out
# Dtypes in which an output is rounded to fewer bits than its sums have.
_ROUNDED = (torch.float16, torch.bfloat16)

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


def schedule(query: Tensor, key: Tensor, *rest: Any) -> str:
    """Name the blocks a call would be cut into."""
    block_q, block_k = _block_sizes(query, key)
    return f"query blocks of {block_q}, fold over key blocks of {block_k}"


def partition(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Partition:
    """The blocks of a call, each of which writes its state; takes what `schedule` does."""
    heads, queries, keys = query.shape[0] * query.shape[1], query.shape[2], key.shape[2]
    rows, block = _block_sizes(query, key)
    tiles, compute = -(-keys // block), _compute_dtype(query.dtype)
    state = (value.shape[3] + 2) * compute.itemsize
    trips = heads * queries * tiles
    states = RoundTrip(
        "memory", f"m, S, W in float{8 * compute.itemsize}", trips, trips * state, trips * state,
        heads * rows * state,
    )  # fmt: skip
    return Partition(
        "eager", schedule(query, key), str(query.device),
        queries, keys, rows, -(-queries // rows), block, tiles, 1, block * tiles, block * tiles, 1,
        0, states,
    )  # fmt: skip


@_without_autocast
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str = "strict", *, dropout: philox.Dropout | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
        visible = min(key.shape[2], rows.stop) if is_causal else key.shape[2]
        for columns in _blocks(visible, block_k):
            scores = _scores(q, key[:, :, columns], attn_mask, rows, columns, is_causal, scale)
            v = value[:, :, None, columns].to(compute)
            part = monoid.lift(scores, v[:, :, :, None])
            keep = _keep(dropout, scores, rows, columns)
            if keep is not None:
                shift = torch.where(part.m.isneginf(), 0.0, part.m)[..., None]
                part = part._replace(W=((scores - shift).exp() * keep) @ v)
            state = monoid.merge(state, part)
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
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    precision: str, needs: Sequence[bool], *, dropout: philox.Dropout | None = None,
    is_shard: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by recomputing P from the saved lse, block by block: O(N) memory beyond the mask's.

    With dP = grad_out V^T, P = exp(scores - lse) and delta = rowsum(P * dP) - grad_lse:
    dV = P^T grad_out, dS = P * (dP - delta), dQ = scale dS K, dK = scale dS^T Q, dmask = dS.

    rowsum(P * dP) is rowsum(grad_out * out), but a half-precision `out` has been rounded to 11 or 8
    bits, which shows where dP is close to delta (rows that are nearly one-hot), and a large
    lse = m + log S has lost digits of log S. Where one block holds all keys, P is therefore the
    softmax of its scores and delta is summed from it; over more blocks a first pass computes m, S
    and sum(P * dP) again where either rounding would show. With dropout dP is multiplied by what
    the weights are multiplied by, and P of dV too. With `is_shard`, out and lse are of rows that
    see further keys, and both are read as they are.

    Returns:
        Gradients of query, key, value and mask; empty where `needs` says that none is wanted.
    """
    compute = _compute_dtype(query.dtype)
    if not grad_lse.numel():
        grad_lse = torch.zeros_like(lse)
    kv_heads = key.shape[1]
    inputs = (query, key, value, attn_mask)
    grads = _zeros_for(inputs, needs, compute)
    block_q, block_k = _block_sizes(query, key)
    again = not is_shard and key.shape[2] > block_k
    again = again and (query.dtype in _ROUNDED or loses_digits(lse))
    # Whether any row sees no key; only on the CPU does a look not wait for a queue.
    dead = lse.isneginf()
    holes = attn_mask is not None and (dead.device.type != "cpu" or bool(dead.any()))
    lse = lse.masked_fill(dead, torch.inf)  # exp(-inf - inf) = 0
    for rows in _blocks(query.shape[2], block_q):
        q, g_out = (_grouped(t[:, :, rows].to(compute), kv_heads) for t in (query, grad_out))
        shift, g_lse = (_grouped(t[:, :, rows, None], kv_heads) for t in (lse, grad_lse))
        visible = min(key.shape[2], rows.stop) if is_causal else key.shape[2]
        terms = (attn_mask, rows, is_causal, scale, dropout)
        whole = visible <= block_k and not is_shard
        if not whole and again:
            blocks = _blocks(visible, block_k)
            shift, total, mean = _first_pass(q, g_out, key, value, *terms, blocks)
            g_out, delta = g_out / total, (mean - g_lse) / total  # P is linear in 1 / S
        elif not whole:
            delta = (g_out * _grouped(out[:, :, rows].to(compute), kv_heads)).sum(-1, True) - g_lse
        for columns in _blocks(visible, block_k):
            k, v = (t[:, :, None, columns].to(compute) for t in (key, value))
            scores = _scores(q, key[:, :, columns], attn_mask, rows, columns, is_causal, scale)
            keep = _keep(dropout, scores, rows, columns)
            d_p = g_out @ v.mT if keep is None else (g_out @ v.mT) * keep
            if not whole:
                p = (scores - shift).exp()
            else:
                p = scores.softmax(-1)
                p = p.masked_fill(shift.isposinf(), 0.0) if holes else p
                delta = (p * d_p).sum(-1, keepdim=True) - g_lse
            g_scores = p * (d_p - delta)
            if is_causal or attn_mask is not None:
                # Rows that see a NaN have it in dS; those from which it is hidden have zeros, and
                # zero times what is not finite is no number.
                k = k.masked_fill(~k.isfinite(), 0.0)
            p = p if keep is None else p * keep
            _add_block(grads, q, k, g_out, p, g_scores, rows, columns, scale)
    grad_query, grad_key, grad_value, grad_mask = (
        query.new_empty(0) if t is None or grad is None else grad.to(t.dtype)
        for t, grad in zip(inputs, grads, strict=True)
    )
    return grad_query, grad_key, grad_value, grad_mask


@_without_autocast
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str, threshold: float, relief: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator `elsa::sparse_attention`: a fold over tiles of 64 keys, in order.

    It saves no time, because every score is computed and a tile that is left out is hidden; it
    serves what no kernel does (float64, other devices) where it is asked for by name.

    Args:
        query: [B, Hq, Nq, D]. key: [B, Hkv, Nk, D]. value: [B, Hkv, Nk, Dv].
        threshold: negative, -inf, or 0 for `exact_threshold`. relief: not read here.

    Returns:
        out [B, Hq, Nq, Dv], lse [B, Hq, Nq] and counts int64 [B, Hq, 5].
    """
    batch, heads, queries, _ = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    compute = torch.promote_types(query.dtype, torch.float32)
    limit = exact_threshold(query.dtype, keys) if threshold == 0.0 else threshold
    q = _grouped(query.to(compute), kv_heads)
    state = monoid.State.identity(q.shape[:-1], value_dim, dtype=compute, device=query.device)
    left_out = query.new_zeros((batch, heads), dtype=torch.int64)
    rows = slice(0, queries)
    for columns in _blocks(min(keys, queries) if is_causal else keys, _TILE):
        scores = _scores(q, key[:, :, columns], attn_mask, rows, columns, is_causal, scale)
        hidden = _tiles_left_out(scores, state.m, limit * math.log(2.0))
        first = columns.start // _TILE if is_causal else 0  # the tiles of rows that see the keys
        left_out += hidden.flatten(1, 2)[..., first:].sum(-1)
        hides = hidden.repeat_interleave(_TILE, -1)[..., :queries, None]
        scores = scores.masked_fill(hides, -math.inf)
        part = monoid.lift(scores, value[:, :, None, None, columns].to(compute))
        state = monoid.merge(state, part)
    out, lse = monoid.finalize(state)
    out = out.flatten(1, 2).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    by_rows, by_keys = -(-queries // _TILE), -(-keys // _TILE)
    seen = by_rows * by_keys
    if is_causal:
        seen = sum(min(by_keys, row + 1) for row in range(by_rows))
    counts = left_out.new_zeros((batch, heads, COUNTS))
    counts[..., 0] = counts[..., 2] = seen
    counts[..., 1], counts[..., 3] = left_out, seen - left_out
    return out, lse.flatten(1, 2), counts


def _tiles_left_out(scores: Tensor, maximum: Tensor, limit: float) -> Tensor:
    """Whether a tile of rows needs nothing of these keys: bool [B, Hkv, G, tiles of rows].

    scores [B, Hkv, G, Nq, n]; maximum [B, Hkv, G, Nq] of the keys before; limit: natural log.
    """
    top = scores.amax(-1)
    # the difference: of large scores maximum + limit would be the maximum itself
    needs = ~((top - maximum <= limit) | top.isneginf())
    missing = -needs.shape[-1] % _TILE
    padded = F.pad(needs, (0, missing))
    found: Tensor = ~padded.unflatten(-1, (-1, _TILE)).any(-1)
    return found


def _zeros_for(
    inputs: tuple[Tensor | None, ...], needs: Sequence[bool], dtype: torch.dtype
) -> list[Tensor | None]:
    formats = (torch.preserve_format,) * 3 + (torch.contiguous_format,)
    return [
        torch.zeros_like(t, dtype=dtype, memory_format=layout) if needed and t is not None else None
        for t, needed, layout in zip(inputs, needs, formats, strict=True)
    ]


def _add_block(
    grads: list[Tensor | None], q: Tensor, k: Tensor, g_out: Tensor, p: Tensor, g_scores: Tensor,
    rows: slice, columns: slice, scale: float,
) -> None:  # fmt: skip
    grad_query, grad_key, grad_value, grad_mask = grads
    if grad_query is not None:
        grad_query[:, :, rows] += (g_scores @ k).flatten(1, 2) * scale
    if grad_key is not None:
        grad_key[:, :, columns] += (g_scores.mT @ q).sum(2) * scale
    if grad_value is not None:
        grad_value[:, :, columns] += (p.mT @ g_out).sum(2)
    if grad_mask is not None:  # dims of size 1 were broadcast
        target = _part(grad_mask, slice(None), slice(None), rows, columns)
        target += g_scores.flatten(1, 2).sum_to_size(target.shape)


def _first_pass(
    q: Tensor, g_out: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, rows: slice,
    is_causal: bool, scale: float, dropout: philox.Dropout | None, blocks: Iterable[slice],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """m, S and sum(P * dP) of each row, [B, Hkv, G, rows, 1]: attention whose values are dP.

    A row that sees no key has m = infinity, S = 1 and the sum 0.
    """
    state = monoid.State.identity(q.shape[:-1], 1, dtype=q.dtype, device=q.device)
    for columns in blocks:
        k, v = key[:, :, columns], value[:, :, None, columns].to(q.dtype)
        scores = _scores(q, k, attn_mask, rows, columns, is_causal, scale)
        keep = _keep(dropout, scores, rows, columns)
        d_p = g_out @ v.mT if keep is None else (g_out @ v.mT) * keep
        state = monoid.merge(state, monoid.lift(scores, d_p[..., None]))
    dead = state.m.isneginf()
    total = state.S.masked_fill(dead, 1.0)[..., None]
    return state.m.masked_fill(dead, torch.inf)[..., None], total, state.W / total


@functools.cache
def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums, whose first exp of the process is taken on one thread.

    MKL picks the kernel of a vector function at its first call; where several threads make that
    call at once, one of them may run a kernel of half the digits (pytorch/pytorch issue 188792).
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    torch.exp(torch.zeros(1, dtype=compute, device="cpu"))
    return compute


def _block_sizes(query: Tensor, key: Tensor) -> tuple[int, int]:
    block_k = max(1, min(key.shape[2], _KEY_BLOCK))
    heads = max(1, query.shape[0] * query.shape[1])
    block_q = max(_QUERY_BLOCK_MIN, SCORES_ALIVE // (heads * block_k))
    return min(block_q, max(1, query.shape[2])), block_k


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


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
        block = _part(attn_mask, slice(None), slice(None), rows, columns)
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


def _part(t: Tensor, *places: slice) -> Tensor:
    """A view of a tensor that is cut along its first dims; those of size 1 are for every place."""
    cut = tuple(slice(None) if n == 1 else at for n, at in zip(t.shape, places, strict=False))
    return t[cut]


def _keep(
    dropout: philox.Dropout | None, scores: Tensor, rows: slice, columns: slice
) -> Tensor | None:
    """What dropout multiplies the weights of a block [B, Hkv, G, rows, columns] by."""
    if dropout is None:
        return None
    batch, kv_heads, group = scores.shape[:3]
    heads = kv_heads * group
    keep = philox.factors(dropout, batch, heads, rows, columns, scores.dtype)
    return _grouped(keep, kv_heads)
