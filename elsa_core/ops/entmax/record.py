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
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_entmax
from elsa_core.ops.entmax import portable as portable_entmax
from elsa_core.ops.factory import Operator, implement, register
from elsa_core.ops.formulas import Formulas

_TERMS = "float alpha, bool is_causal, float scale, str precision"
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? head_alpha"
_SCHEMA = f"({_INPUTS}, {_TERMS}) -> (Tensor, Tensor, Tensor)"
_WANTED = ("query", "key", "value", "attn_mask", "head_alpha")


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
    wide = torch.promote_types(query.dtype, torch.float32)
    tile = eager_entmax.TILE
    tiles = (batch, heads, (length + tile - 1) // tile, (key.shape[2] + tile - 1) // tile)
    rows = query.new_empty((3, batch, heads, length), dtype=wide)
    return out, rows, query.new_empty(tiles, dtype=torch.uint8)


FORMULAS = Formulas(
    "entmax_attention",
    _SCHEMA,
    _WANTED,
    eager_entmax.backward,
    saved=("out", "rows", "tiles"),
    like=3,
)
ENTMAX_ATTENTION = register(
    Operator(
        name="entmax_attention",
        schema=_SCHEMA,
        reference=eager_entmax.attention,
        portable=portable_entmax.entmax_attention,
        fake=_fake,
        gradients=FORMULAS.gradients,
        terms=_WANTED,
        twin=True,
        bench="elsa_core.profiling.bench.entmax:ENTMAX",
    )
)
# On devices without kernels of this operator the name stands for the reference too.
implement("entmax_attention", eager_entmax.attention, "CompositeExplicitAutograd")
implement("entmax_attention_backward", eager_entmax.backward, "CompositeExplicitAutograd")
