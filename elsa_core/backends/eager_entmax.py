"""alpha-entmax attention in plain PyTorch: any device, any floating dtype, bounded memory.

A row of scores s with maximum m has the weights r_j / Z, r_j = [1 + b (s_j - m)]_+^(1 / a), with
a = alpha - 1, Z = sum(r) and the slope b > 0 for which Z^a = b / a. These are the weights
[a s_j - tau]_+^(1 / a) of alpha-entmax, tau = a m - a / b; written relative to the maximum they
keep their digits at alpha near 1 (where they become softmax) and for large scores.

With c = a / b in [n^-a, 1] the condition is c = Z(c)^-a. Newton's step on the norm
(sum_j [a s_j - tau]_+^(1 / a))^a is c - (Z / Y) (c - Z^-a) with Y = sum(r^(1 - a)). It lies between
c and Z^-a, which enclose the root; for alpha <= 2 the norm is convex and the steps are monotone.
For alpha > 2 a step that does not halve the enclosure is replaced by a bisection of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core.backends import eager

TILE = 64  # queries and keys of a tile whose emptiness is noted
# At alpha = 1 the formulas in a take their limit: 1 + b x is 1 to the last digit, log1p(b x) / a is
# x / c.
_LEAST = 2.0**-60
_MOST_STEPS = 60
# What a block of rows is cut out of: batches, key heads, their query heads, and queries.
Rows = tuple[slice, slice, slice, slice]


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, head_alpha: Tensor | None,
    alpha: float, is_causal: bool, scale: float, precision: str = "strict",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """alpha-entmax attention, some rows at a time.

    Layouts are those of the operator `elsa::entmax_attention`; scores and sums are float32, or
    float64 for float64 inputs. At most 2**22 scores, or 64 rows of one key head, are alive at once.

    Returns:
        out [B, Hq, Nq, Dv] in the query's dtype, memory [B, Nq, Hq, Dv]; rows [3, B, Hq, Nq]: the
        maximum of the scores (-inf where no key is seen), b and Z; tiles [B, Hq, Nq / 64, Nk / 64],
        uint8: 1 where a tile of 64 queries and 64 keys holds a weight that is not 0.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    batch, heads, queries, _ = query.shape
    keys, value_dim = value.shape[2:]
    out = query.new_zeros((batch, queries, heads, value_dim)).transpose(1, 2)
    rows = query.new_zeros((3, batch, heads, queries), dtype=wide)
    sizes = (batch, heads, -(-queries // TILE), -(-keys // TILE))
    tiles = query.new_zeros(sizes, dtype=torch.uint8)
    if not keys:
        rows[0] = -math.inf
        return out, rows, tiles
    with torch.autocast(query.device.type, enabled=False):
        for part in _parts(query, key):
            q, k, v, mask, a = _operands(query, key, value, attn_mask, head_alpha, alpha, part)
            b, _, h, n = part
            scores = eager._scores(q, k, mask, n, slice(0, keys), is_causal, scale)
            found = solve(scores, a)
            r = powers(scores, found, a)[1]
            top, slope, total = (x[..., 0].flatten(1, 2) for x in found)
            out[b, h, n] = ((r / found.total) @ v[:, :, None]).flatten(1, 2).to(out.dtype)
            rows[:, b, h, n] = torch.stack((top, slope, total))
            where = slice(n.start // TILE, -(-n.stop // TILE))
            alive = F.pad((r > 0).to(torch.uint8), (0, -keys % TILE, 0, -r.shape[-2] % TILE))
            alive = alive.unflatten(-1, (-1, TILE)).amax(-1).unflatten(-2, (-1, TILE)).amax(-2)
            tiles[b, h, where] = alive.flatten(1, 2)
    return out, rows, tiles


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    head_alpha: Tensor | None, out: Tensor, rows: Tensor, tiles: Tensor, alpha: float,
    is_causal: bool, scale: float, precision: str, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients, with the weights computed again from `rows`, some rows at a time.

    With P the weights, U = P^(2 - alpha), dP = grad_out V^T and delta = sum(U dP) / sum(U):
    dV = P^T grad_out, dS = U (dP - delta), dQ = scale dS K, dK = scale dS^T Q, dmask = dS (Peters
    et al., 1905.05702, Prop. 2); the derivative by alpha is sum(h (dP - delta)) with h of
    `slant` (Correia et al., 1909.00015, Prop. 1, without its part that sums to zero).

    Returns:
        Gradients of query, key, value, mask and head_alpha; empty where `needs` says that none is
        wanted.
    """
    wide = rows.dtype
    inputs = (query, key, value, attn_mask)
    grads = eager._zeros_for(inputs, needs[:4], wide)
    grad_alpha = torch.zeros_like(head_alpha, dtype=wide) if needs[4] else None  # type: ignore[arg-type]
    with torch.autocast(query.device.type, enabled=False):
        for part in _parts(query, key) if key.shape[2] else ():
            q, k, v, mask, a = _operands(query, key, value, attn_mask, head_alpha, alpha, part)
            b, kv, h, n = part
            kv_heads = k.shape[1]
            g_out = eager._grouped(grad_out[b, h, n].to(wide), kv_heads)
            found = Solved(*(eager._grouped(x[b, h, n, None], kv_heads) for x in rows))
            scores = eager._scores(q, k, mask, n, slice(0, k.shape[2]), is_causal, scale)
            ones, r = powers(scores, found, a)
            u = torch.where(r > 0, r / ones, 0.0)
            d_p = g_out @ v[:, :, None].mT
            total = u.sum(-1, keepdim=True)
            delta = (u * d_p).sum(-1, keepdim=True) / torch.where(total > 0, total, 1.0)
            d_p -= delta
            p = r / found.total
            if grad_alpha is not None:
                found_alpha = (slant(p, a) * d_p).sum((-2, -1)).flatten(1, 2)
                target = eager._part(grad_alpha, b, h)
                target += found_alpha[..., None, None].sum_to_size(target.shape)
            d_s = u * found.total ** (_at(a) - 1) * d_p
            cut = [None if g is None else g[b] for g in grads]
            cut[:3] = [
                g if g is None else g[:, i] for g, i in zip(cut[:3], (h, kv, kv), strict=True)
            ]
            if cut[3] is not None:
                cut[3] = eager._part(grads[3], b, h)  # type: ignore[arg-type]
            eager._add_block(cut, q, k[:, :, None], g_out, p, d_s, n, slice(None), scale)
    found_grads = [
        query.new_empty(0) if t is None or g is None else g.to(t.dtype)
        for t, g in zip((*inputs, head_alpha), (*grads, grad_alpha), strict=True)
    ]
    return tuple(found_grads)  # type: ignore[return-value]


class Solved(NamedTuple):
    """Of each row, [..., rows, 1]: the maximum, the slope b and the sum Z."""

    top: Tensor
    slope: Tensor
    total: Tensor


def solve(scores: Tensor, a: Tensor | float, steps: int = 0) -> Solved:
    """The rows of scores [..., rows, keys], keys > 0, with a = alpha - 1.

    Args:
        scores: float32 or float64; -inf takes no part.
        a: a number, or a tensor [..., rows or 1, 1] of the scores' dtype.
        steps: how many to take; 0: until every row has converged, which looks at values.
    """
    top = scores.amax(-1, keepdim=True)
    x = scores - top.masked_fill(top == -math.inf, 0.0)
    c = torch.ones_like(top)
    number = _at(a)
    low = c * torch.exp(-number * math.log(scores.shape[-1]))
    high = c
    eps = torch.finfo(scores.dtype).eps
    # a step of relative size d leaves an error of the order of d^min(2, 1 / a)
    close = (eps ** number.clamp(0.5, 1.0) / 16).clamp_min(8 * eps)
    for step in range(steps or _MOST_STEPS):
        v, r = _powers(x, number / c, a)
        z = r.sum(-1, keepdim=True)
        y = torch.where(r > 0, r / v, 0.0).sum(-1, keepdim=True)
        other = torch.where(z == 0, c, z**-number)
        width = high - low
        low = torch.maximum(low, torch.minimum(c, other))
        high = torch.minimum(high, torch.maximum(c, other))
        new = c - torch.where(y > 0, z / y, 0.0) * (c - other)
        new = torch.minimum(torch.maximum(new, low), high)
        if step:
            slow = (number > 1) & (high - low > 0.5 * width)
            new = torch.where(slow, (low * high).sqrt(), new)
        moved = torch.minimum((new - c).abs(), high - low)
        c = new
        if not steps and not bool((moved > close * c).any()):
            break
    slope = number / c
    r = _powers(x, slope, a)[1]
    total = r.sum(-1, keepdim=True)
    return Solved(top, slope.expand_as(top), torch.where(total == 0, 1.0, total))


def powers(scores: Tensor, found: Solved, a: Tensor | float) -> tuple[Tensor, Tensor]:
    """v = [1 + b (s - m)]_+ and r = v^(1 / a)."""
    x = scores - found.top.masked_fill(found.top == -math.inf, 0.0)
    return _powers(x, found.slope, a)


def _powers(x: Tensor, slope: Tensor, a: Tensor | float) -> tuple[Tensor, Tensor]:
    z = (x * slope).clamp_min(-1.0)
    v = 1.0 + z
    if isinstance(a, float) and a in (0.5, 1.0):
        return v, v if a == 1.0 else v * v
    return v, torch.exp(torch.log1p(z) / a)


def slant(p: Tensor, a: Tensor | float) -> Tensor:
    """h with d p / d alpha = h - U sum(h) / sum(U), up to multiples of U.

    With l = ln(p^a): h = -p (expm1(-l) + l) / a^2, which is -p ln(p)^2 / 2 at alpha = 1; for
    alpha > 2, where U has no bound, p (1 - l) / a^2.
    """
    number = _at(a)
    log_p = torch.where(p > 0, p, 1.0).log()
    low = log_p * number
    few = 0.25 if p.dtype == torch.float32 else 2.0**-8
    series = 1 - low / 3 * (1 - low / 4 * (1 - low / 5 * (1 - low / 6 * (1 - low / 7))))
    large = (torch.expm1(-low) + low) / (number * number)
    bent = torch.where(low.abs() < few, log_p * log_p * (0.5 * series), large)
    return p * torch.where(number > 1, (1 - low) / (number * number), -bent)


def _at(a: Tensor | float) -> Tensor:
    return a if isinstance(a, Tensor) else torch.tensor(a, dtype=torch.float64)


def _parts(query: Tensor, key: Tensor) -> Iterator[Rows]:
    """Blocks of at most `eager.SCORES_ALIVE` scores, or of 64 rows of one key head."""
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    if not (batch and heads and queries):
        return
    group, alive = heads // kv_heads, eager.SCORES_ALIVE // keys  # rows of scores
    rows = max(TILE, min(queries, alive // group) // TILE * TILE)
    alive //= min(rows, queries)
    some_heads = max(1, min(kv_heads, alive // group))
    some_batches = max(1, min(batch, alive // heads)) if some_heads == kv_heads else 1
    for b in eager._blocks(batch, some_batches):
        for h in eager._blocks(kv_heads, some_heads):
            for n in eager._blocks(queries, rows):
                yield b, h, slice(h.start * group, h.stop * group), n


def _operands(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, head_alpha: Tensor | None,
    alpha: float, part: Rows,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | float]:  # fmt: skip
    """query [B, Hkv, G, rows, D], key and value [B, Hkv, N, D], the mask's part, and alpha - 1."""
    wide = torch.promote_types(query.dtype, torch.float32)
    b, kv, h, n = part
    k, v = (t[b, kv].to(wide) for t in (key, value))
    q = eager._grouped(query[b, h, n].to(wide), k.shape[1])
    mask = None if attn_mask is None else eager._part(attn_mask, b, h)
    if head_alpha is None:
        return q, k, v, mask, max(alpha - 1.0, _LEAST)
    a = _checked(eager._part(head_alpha, b, h).to(wide))
    a = eager._grouped(a, k.shape[1]) if a.shape[1] > 1 else a.unsqueeze(1)
    return q, k, v, mask, a


def _checked(alpha: Tensor) -> Tensor:
    """alpha - 1; NaN, and with it the results, where alpha lies outside [1, 4]."""
    inside = (alpha >= 1) & (alpha <= 4)
    return torch.where(inside, (alpha - 1).clamp_min(_LEAST), math.nan)
