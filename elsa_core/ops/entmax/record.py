"""The operator `elsa::entmax_attention` and its gradients `elsa::entmax_attention_backward`.

Layouts: query [B, Hq, Nq, D], key [B, Hkv, Nk, D], value [B, Hkv, Nk, Dv], any strides, Hq a
multiple of Hkv; attn_mask 4-D, each dim full or 1, bool (True takes part), float32 or the query's
dtype; head_alpha None or [B or 1, Hq or 1, 1, 1], floating, then `alpha` is not read; entries
outside [1, 4] make NaN of their heads' results.

Results: out [B, Hq, Nq, Dv] in the query's dtype, in the memory of [B, Nq, Hq, Dv]; rows
[3, B, Hq, Nq], float32 (float64 for float64): the maximum of the scores, -inf where no key is seen,
the slope b and the sum Z of `elsa_core.backends.eager_entmax`; tiles [B, Hq, Nq / 64, Nk / 64],
rounded up, uint8: 1 where a tile of 64 queries and 64 keys holds a weight that is not 0, which
kernels of the gradients read to skip the others. A row that sees no key gives zeros.

`needs` says which gradients are wanted, of query, key, value, mask and head_alpha: the others come
back as an empty tensor [0]. rows and tiles have no gradients.

`elsa::entmax_varlen_attention` and its gradients are those of packed sequences: query [T, Hq, D],
key [Tk, Hkv, D], value [Tk, Hkv, Dv] and cu_seqlens_q, cu_seqlens_k [S + 1] as those of
`elsa::varlen_attention`; head_alpha None or [S or 1, Hq or 1, 1, 1]; longest_q and longest_k: the
longest sequence or more, which the host must know since results and workspaces are sized by them.
Results: out [T, Hq, Dv], dense; rows [3, Hq, T]; tiles [Hq, T / 64 + S, longest_k / 64], T / 64
rounded down and the other up: sequence s has the rows from cu_seqlens_q[s] / 64 + s on, again
rounded down. The lengths are data of the call: no program depends on them. Plain PyTorch computes
one sequence after another; the portable form, which `torch.onnx.export` writes, all pairs of tokens
under a mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_entmax, eager_varlen
from elsa_core.backends.eager_entmax import Solved
from elsa_core.ops.attention import portable
from elsa_core.ops.factory import implement
from elsa_core.ops.formulas import differentiable

_TERMS = "float alpha, bool is_causal, float scale, str precision"
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? head_alpha"
_SCHEMA = f"({_INPUTS}, {_TERMS}) -> (Tensor, Tensor, Tensor)"
_VARLEN_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? head_alpha"
)
_VARLEN_TERMS = (
    "SymInt longest_q, SymInt longest_k, float alpha, bool is_causal, float scale, str precision"
)
_WANTED = ("query", "key", "value", "attn_mask", "head_alpha")
# Steps of the solver, by whether alpha <= 2: there rows of random scores were seen to take ten at
# most in float32; above it bisections take part.
_STEPS = {True: 20, False: 60}


def _portable(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, head_alpha: Tensor | None,
    alpha: float, is_causal: bool, scale: float, precision: str = "strict",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Operations that exporters and `torch.func` know, for any length: all scores at once, a fixed
    number of steps, and the formulas of autograd.

    The slope comes out of the solver without a derivative. Two steps of Newton's method that are
    differentiated give it its first and second derivatives. rows and tiles are empty [0].
    """
    place = query.device.type
    if place != "meta" and torch.is_autocast_enabled(place):  # scores and sums stay wide
        with torch.autocast(place, enabled=False):
            return _portable(
                query, key, value, attn_mask, head_alpha, alpha, is_causal, scale, precision
            )
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = portable.scores_of(query, key, attn_mask, is_causal, scale)
    if not key.shape[2]:
        # zeros that depend on the operands, as autograd has to find them
        return (scores @ value.to(wide)).to(query.dtype), query.new_empty(0), query.new_empty(0)
    a: Tensor | float = max(alpha - 1.0, eager_entmax._LEAST)
    if head_alpha is not None:
        a = eager_entmax._checked(head_alpha.to(wide))
    few = head_alpha is None and alpha <= 2
    detached = a.detach() if isinstance(a, Tensor) else a
    found = eager_entmax.solve(scores.detach(), detached, _STEPS[few])
    weights = _weights(scores, found, a)
    out = (weights @ value.to(wide)).to(query.dtype)
    return out, query.new_empty(0), query.new_empty(0)


def _varlen_portable(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    head_alpha: Tensor | None, longest_q: int, longest_k: int, alpha: float, is_causal: bool,
    scale: float, precision: str = "strict",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`elsa::entmax_varlen_attention`: every pair of tokens, under a mask of their sequences."""
    tokens = query.shape[0], key.shape[0]
    seen, rows = portable.within(cu_seqlens_q, cu_seqlens_k, *tokens, is_causal)
    if head_alpha is not None and head_alpha.shape[0] > 1:
        head_alpha = head_alpha[rows, :, :, 0].permute(2, 1, 0).unsqueeze(-1)  # [1, H, T, 1]
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    out, *_ = _portable(q, k, v, seen, head_alpha, alpha, False, scale, precision)
    return out.squeeze(0).transpose(0, 1), query.new_empty(0), query.new_empty(0)


def _weights(scores: Tensor, found: Solved, a: Tensor | float) -> Tensor:
    """The weights, differentiable in the scores and in a.

    A hidden or empty score is replaced by 0 before anything is computed of it, so that no
    derivative meets an infinity.
    """
    fixed = a.detach() if isinstance(a, Tensor) else a
    v = eager_entmax.powers(scores.detach(), found, fixed)[0]
    alive = (v > 0) & (scores.detach() > -math.inf)
    top = found.top.masked_fill(found.top == -math.inf, 0.0)
    x = torch.where(alive, scores - top, 0.0)
    c = fixed / found.slope
    dead = ~alive.any(-1, keepdim=True)  # rows without a key: sums of 1, weights of 0
    for step in range(3):
        bent = torch.where(alive, x * (a / c), 0.0)
        r = torch.where(alive, torch.exp(torch.log1p(bent) / a), 0.0)
        z = r.sum(-1, keepdim=True).masked_fill(dead, 1.0)
        if step < 2:
            y = (r / (1.0 + bent)).sum(-1, keepdim=True).masked_fill(dead, 1.0)
            c = c - z / y * (c - z ** (-a if isinstance(a, Tensor) else -float(a)))
    return r / z


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
    wide = torch.promote_types(query.dtype, torch.float32)
    tile = eager_entmax.TILE
    tiles = (batch, heads, (length + tile - 1) // tile, (key.shape[2] + tile - 1) // tile)
    rows = query.new_empty((3, batch, heads, length), dtype=wide)
    return out, rows, query.new_empty(tiles, dtype=torch.uint8)


ENTMAX_ATTENTION, _ = differentiable(
    "entmax_attention", _SCHEMA, _WANTED, eager_entmax.attention, _fake, eager_entmax.backward,
    saved=("out", "rows", "tiles"), like=3, portable=_portable,
    bench="elsa_core.profiling.bench.entmax:ENTMAX",
)  # fmt: skip


def _varlen_fake(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    head_alpha: Tensor | None, longest_q: int, longest_k: int, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, heads, _ = query.shape
    tile = eager_entmax.TILE
    wide = torch.promote_types(query.dtype, torch.float32)
    sizes = (heads, tokens // tile + cu_seqlens_q.shape[0] - 1, (longest_k + tile - 1) // tile)
    out = query.new_empty((tokens, heads, value.shape[-1]))
    rows = query.new_empty((3, heads, tokens), dtype=wide)
    return out, rows, query.new_empty(sizes, dtype=torch.uint8)


ENTMAX_VARLEN_ATTENTION, _ = differentiable(
    "entmax_varlen_attention", f"({_VARLEN_INPUTS}, {_VARLEN_TERMS}) -> (Tensor, Tensor, Tensor)",
    ("query", "key", "value", "head_alpha"), eager_varlen.entmax_attention, _varlen_fake,
    eager_varlen.entmax_backward, saved=("out", "rows", "tiles"), like=3,
    portable=_varlen_portable,
)  # fmt: skip
# On devices without kernels of these operators the names stand for the references too.
for _record in (ENTMAX_ATTENTION, ENTMAX_VARLEN_ATTENTION):
    implement(_record.name, _record.reference, "CompositeExplicitAutograd")
