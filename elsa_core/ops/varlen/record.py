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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_varlen
from elsa_core.ops.attention import portable
from elsa_core.ops.factory import Backward, Gradients, Grads, Operator, needed, register

_TERMS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "{results}bool is_causal, float scale, str precision"
)
_SCHEMA = f"({_TERMS.format(results='')}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    f"(Tensor grad_out, Tensor grad_lse, {_TERMS.format(results='Tensor out, Tensor lse, ')}, "
    "bool[] needs) -> (Tensor, Tensor, Tensor)"
)


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty((tokens, heads, value.shape[-1]))
    return out, query.new_empty((heads, tokens), dtype=lse_dtype)


def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs: Sequence[bool] = rest[-1]
    grad_query, grad_key, grad_value = (
        torch.empty_like(t) if wanted else query.new_empty(0)
        for t, wanted in zip((query, key, value), needs, strict=True)
    )
    return grad_query, grad_key, grad_value


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # None then means no gradient of lse, not zeros
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.terms = inputs[5:]


def _backward(operator: Any, ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Grads:
    saved = ctx.saved_tensors
    out, lse = saved[5:]
    needs = list(ctx.needs_input_grad[:3])
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is None:
        grad_lse = lse.new_zeros(0)
    grads = operator(grad_out, grad_lse, *saved, *ctx.terms, needs)
    return *needed(grads, needs), *(None,) * 5


def _twice(ctx: Any, *grads: Tensor) -> Grads:
    raise RuntimeError(
        "elsa.varlen_attention is differentiable once by torch.autograd; second derivatives come "
        "from torch.func (torch.func.hessian, or torch.func.grad of torch.func.grad)"
    )


VARLEN_ATTENTION = register(
    Operator(
        name="varlen_attention",
        schema=_SCHEMA,
        reference=eager_varlen.attention,
        portable=portable.varlen_attention,
        fake=_fake,
        gradients=Gradients(
            setup_context=_setup_context,
            formula=_backward,
            backward=Backward(
                schema=_BACKWARD_SCHEMA,
                fake=_backward_fake,
                reference=eager_varlen.backward,
                formula=_twice,
            ),
        ),
        kind="varlen",
        terms=("query", "key", "value"),
        twin=True,
        bench="elsa_core.profiling.bench.varlen:VARLEN",
    )
)
