"""The operator `elsa::entmax_varlen_attention` and its gradients,
`elsa::entmax_varlen_attention_backward`.

Layouts: query [T, Hq, D], key [Tk, Hkv, D], value [Tk, Hkv, Dv] and cu_seqlens_q, cu_seqlens_k
[S + 1] as those of `elsa::varlen_attention`; head_alpha None or [S or 1, Hq or 1, 1, 1], floating,
then `alpha` is not read; longest_q and longest_k: the longest sequence or more, which the host
must know since results and workspaces are sized by them. With is_causal the query i of a sequence
sees its keys 0..i.

Results: out [T, Hq, Dv] in the query's dtype, dense; rows [3, Hq, T], float32 (float64 for
float64): of each row what `elsa::entmax_attention` has; tiles [Hq, T / 64 + S, longest_k / 64], T /
64 rounded down and the other up, uint8: sequence s has the rows from cu_seqlens_q[s] / 64 + s on,
again rounded down, 1 where a tile of 64 queries and 64 keys of it holds a weight that is not 0. A
query of a sequence without keys gives zeros.

The lengths are data of the call: no program depends on them. `needs` says which gradients are
wanted, of query, key, value and head_alpha: the others come back as an empty tensor [0].

Plain PyTorch computes one sequence after another; the portable form, which `torch.onnx.export`
writes, all pairs of tokens under a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_entmax, eager_varlen
from elsa_core.ops.entmax import portable as portable_entmax
from elsa_core.ops.factory import Operator, implement, register
from elsa_core.ops.formulas import Formulas

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? head_alpha"
)
_TERMS = (
    "SymInt longest_q, SymInt longest_k, float alpha, bool is_causal, float scale, str precision"
)
_SCHEMA = f"({_INPUTS}, {_TERMS}) -> (Tensor, Tensor, Tensor)"
_WANTED = ("query", "key", "value", "head_alpha")


def _fake(
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


FORMULAS = Formulas(
    "entmax_varlen_attention",
    _SCHEMA,
    _WANTED,
    eager_varlen.entmax_backward,
    saved=("out", "rows", "tiles"),
    like=3,
)
ENTMAX_VARLEN_ATTENTION = register(
    Operator(
        name="entmax_varlen_attention",
        schema=_SCHEMA,
        reference=eager_varlen.entmax_attention,
        portable=portable_entmax.entmax_varlen_attention,
        fake=_fake,
        gradients=FORMULAS.gradients,
        terms=_WANTED,
        twin=True,
    )
)
# On devices without kernels of this operator the name stands for the reference too.
implement("entmax_varlen_attention", eager_varlen.entmax_attention, "CompositeExplicitAutograd")
implement(
    "entmax_varlen_attention_backward", eager_varlen.entmax_backward, "CompositeExplicitAutograd"
)
