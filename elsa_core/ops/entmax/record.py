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

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_entmax, eager_varlen
from elsa_core.ops.entmax import portable as portable_entmax
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
    saved=("out", "rows", "tiles"), like=3, portable=portable_entmax.entmax_attention,
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
    portable=portable_entmax.entmax_varlen_attention,
)  # fmt: skip
# On devices without kernels of these operators the names stand for the references too.
for _record in (ENTMAX_ATTENTION, ENTMAX_VARLEN_ATTENTION):
    implement(_record.name, _record.reference, "CompositeExplicitAutograd")
