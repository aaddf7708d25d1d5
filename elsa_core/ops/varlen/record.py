"""The operator `elsa::varlen_attention` and its gradients `elsa::varlen_attention_backward`.

Layouts: query [T, Hq, D], key [Tk, Hkv, D], value [Tk, Hkv, Dv], any strides, Hq a multiple of Hkv;
the tokens of all sequences one after another. cu_seqlens_q and cu_seqlens_k [S + 1], int32 or int64
on the device of the query: sequence s has queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1 and
sees the keys cu_seqlens_k[s] to cu_seqlens_k[s + 1] - 1. Results: out [T, Hq, Dv] in the query's
dtype, dense; lse [Hq, T], natural log, float32 (float64 for float64). A query of a sequence without
keys: zeros and -inf. With is_causal the query i of a sequence sees its keys 0..i.

The lengths are data of the call: no program depends on them, nor on the longest one. `needs` of the
backward says which gradients are wanted, of query, key and value: the others are not computed and
come back as an empty tensor [0]. `grad_lse` is [Hq, T], or [0] where nothing depends on lse.

The portable form, which `torch.onnx.export` writes, computes all pairs of tokens under a mask of
[T, Tk]: a graph holds no loop over lengths. Padded batches cost less there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_varlen
from elsa_core.ops.attention import portable
from elsa_core.ops.formulas import differentiable

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "bool is_causal, float scale, str precision) -> (Tensor, Tensor)"
)
_TERMS = ("query", "key", "value")


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty((tokens, heads, value.shape[-1]))
    return out, query.new_empty((heads, tokens), dtype=lse_dtype)


VARLEN_ATTENTION, _ = differentiable(
    "varlen_attention", _SCHEMA, _TERMS, eager_varlen.attention, _fake, eager_varlen.backward,
    saved=("out", "lse"), like=3, portable=portable.varlen_attention, kind="varlen",
    bench="elsa_core.profiling.bench.varlen:VARLEN",
)  # fmt: skip
