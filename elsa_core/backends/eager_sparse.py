"""Attention that leaves out tiles of negligible weights, in plain PyTorch: what it means.

It saves no time, because every score is computed and a tile that is left out is hidden; it serves
what no kernel does (float64, other devices) where it is asked for by name.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from elsa_core import monoid
from elsa_core.backends import eager
from elsa_core.base.skipping import COUNTS, exact_threshold

TILE = 64  # queries and keys of a tile


def schedule(*arguments: object) -> str:
    """How a call is cut, in words."""
    return f"fold over tiles of {TILE} keys, every score computed"


@eager._without_autocast
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str, threshold: float, relief: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator `elsa::sparse_attention`: a fold over tiles of 64 keys, in order.

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
    q = eager._grouped(query.to(compute), kv_heads)
    state = monoid.State.identity(q.shape[:-1], value_dim, dtype=compute, device=query.device)
    left_out = query.new_zeros((batch, heads), dtype=torch.int64)
    rows = slice(0, queries)
    for columns in eager._blocks(eager._visible_keys(key, rows, is_causal), TILE):
        scores = eager._scores(q, key[:, :, columns], attn_mask, rows, columns, is_causal, scale)
        hidden = _tiles_left_out(scores, state.m, limit * math.log(2.0))
        first = columns.start // TILE if is_causal else 0  # the tiles of rows that see the keys
        left_out += hidden.flatten(1, 2)[..., first:].sum(-1)
        hides = hidden.repeat_interleave(TILE, -1)[..., :queries, None]
        scores = scores.masked_fill(hides, -math.inf)
        part = monoid.lift(scores, value[:, :, None, None, columns].to(compute))
        state = monoid.merge(state, part)
    out, lse = monoid.finalize(state)
    out = out.flatten(1, 2).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    by_rows, by_keys = -(-queries // TILE), -(-keys // TILE)
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
    missing = -needs.shape[-1] % TILE
    padded = torch.nn.functional.pad(needs, (0, missing))
    found: Tensor = ~padded.unflatten(-1, (-1, TILE)).any(-1)
    return found
