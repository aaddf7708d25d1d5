"""The operator `elsa::attention` and its gradients `elsa::attention_backward`.

Layouts: query [B, Hq, Nq, D], key [B, Hkv, Nk, D], value [B, Hkv, Nk, Dv], any strides, Hq a
multiple of Hkv; attn_mask 4-D, each dim full or 1, bool (True takes part), float32 or the query's
dtype. Results: out [B, Hq, Nq, Dv] in the query's dtype, in the memory of [B, Nq, Hq, Dv]; lse
[B, Hq, Nq], natural log, float32 (float64 for float64). A row that sees no key: zeros and -inf.

`needs` says which gradients are wanted, of query, key, value and mask: the others are not computed
and come back as an empty tensor [0]. A gradient has the dtype and shape of its input; query's,
key's and value's are laid out as `torch.empty_like` of them, the mask's is contiguous. `grad_lse`
is [B, Hq, Nq], or [0] on CUDA devices where nothing depends on lse (its backends in
`elsa_core.dispatch` are given zeros [B, Hq, Nq] of stride 0 for it).

What is saved is (out, lse): P = exp(score - lse), and the rounding of lse, 2**-24 |lse| at most, is
a relative error of P. For |lse| <= 2**11 that is below 2**-13 in float32, no more than what half
precision rounds. Of larger ones the formulas in plain PyTorch compute (m, S) again in a first pass
over the keys.

Dropout is an operator of its own, `elsa::attention_dropout`, so that programs and bundles never
hold it. It has two terms more: `dropout_p` in [0, 1], and `seed`, int64 [2], the seed and the
offset of the keep mask that `elsa_core.backends.philox` defines. The weights after softmax are
multiplied by keep / (1 - p), all by 0 for p = 1; lse is that without dropout. The gradients compute
the mask again.

A native library that is loaded without this package (a bundle, a program) defines
`elsa::attention` itself; loaded by this package it leaves that to this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager
from elsa_core.backends.philox import Dropout
from elsa_core.ops.attention import portable
from elsa_core.ops.formulas import differentiable

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float scale, str precision) -> (Tensor, Tensor)"
)
_TERMS = ("query", "key", "value", "attn_mask")


def fake(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty((batch, heads, length), dtype=lse_dtype)


ATTENTION, _FORMULAS = differentiable(
    "attention", _SCHEMA, _TERMS, eager.attention, fake, eager.backward, saved=("out", "lse"),
    like=3, again=eager.backward, portable=portable.attention, kind="attention",
    onnx="elsa_core.exporting.onnx_attention:EXPORT",
    bench="elsa_core.profiling.bench.peers:ATTENTION",
    bench_gradients="elsa_core.profiling.bench.gradients:GRADIENTS",
)  # fmt: skip
Eager = _FORMULAS.recorded()


def _dropped_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *terms, dropout_p, seed, needs = arguments
    return eager.backward(*terms, needs, dropout=Dropout(dropout_p, seed))


ATTENTION_DROPOUT, _ = differentiable(
    "attention_dropout", _SCHEMA.replace(")", ", float dropout_p, Tensor seed)", 1), _TERMS,
    lambda *given: eager.attention(*given[:7], dropout=Dropout(*given[7:])),
    lambda *given: fake(*given[:7]), _dropped_backward, saved=("out", "lse"), like=3,
    again=_dropped_backward,
)  # fmt: skip
