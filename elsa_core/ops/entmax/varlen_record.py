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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_entmax, eager_entmax_varlen
from elsa_core.ops.entmax import portable as portable_entmax
from elsa_core.ops.factory import Backward, Gradients, Grads, Operator, implement, needed, register

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? head_alpha"
)
_TERMS = (
    "SymInt longest_q, SymInt longest_k, float alpha, bool is_causal, float scale, str precision"
)
_SCHEMA = f"({_INPUTS}, {_TERMS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor rows, Tensor tiles, {_TERMS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_alpha: Tensor | None,
    longest_q: int,
    longest_k: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _ = query.shape
    tile = eager_entmax.TILE
    wide = torch.promote_types(query.dtype, torch.float32)
    sizes = (heads, tokens // tile + cu_seqlens_q.shape[0] - 1, (longest_k + tile - 1) // tile)
    out = query.new_empty((tokens, heads, value.shape[-1]))
    rows = query.new_empty((3, heads, tokens), dtype=wide)
    return out, rows, query.new_empty(sizes, dtype=torch.uint8)


def _backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_alpha: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs: Sequence[bool] = rest[-1]
    grads = [
        torch.empty_like(t) if wanted else query.new_empty(0)
        for t, wanted in zip((query, key, value), needs, strict=False)
    ]
    of_alpha = query.new_empty(0)
    if needs[3] and head_alpha is not None:
        of_alpha = torch.empty_like(head_alpha, memory_format=torch.contiguous_format)
    return grads[0], grads[1], grads[2], of_alpha


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, rows, tiles = output
    ctx.mark_non_differentiable(rows, tiles)
    ctx.save_for_backward(*inputs[:6], out, rows, tiles)
    ctx.terms = inputs[6:]


def _backward(operator: Any, ctx: Any, grad_out: Tensor, *others: Tensor) -> Grads:
    """The gradients of `elsa::entmax_varlen_attention`: only those that are wanted."""
    wants = ctx.needs_input_grad
    needs = [*wants[:3], wants[5]]
    grads = needed(operator(grad_out, *ctx.saved_tensors, *ctx.terms, needs), needs)
    return *grads[:3], None, None, grads[3], *(None,) * 6


def _twice(ctx: Any, *grads: Tensor) -> Grads:
    raise RuntimeError(
        "elsa.entmax_varlen_attention is differentiable once by torch.autograd; second derivatives "
        "come from torch.func (torch.func.hessian, or torch.func.grad of torch.func.grad)"
    )


ENTMAX_VARLEN_ATTENTION = register(
    Operator(
        name="entmax_varlen_attention",
        schema=_SCHEMA,
        reference=eager_entmax_varlen.attention,
        portable=portable_entmax.entmax_varlen_attention,
        fake=_fake,
        gradients=Gradients(
            setup_context=_setup_context,
            formula=_backward,
            backward=Backward(
                schema=_BACKWARD_SCHEMA,
                fake=_backward_fake,
                reference=eager_entmax_varlen.backward,
                formula=_twice,
            ),
        ),
        terms=("query", "key", "value", "head_alpha"),
        twin=True,
    )
)
# On devices without kernels of this operator the name stands for the reference too.
implement("entmax_varlen_attention", eager_entmax_varlen.attention, "CompositeExplicitAutograd")
implement(
    "entmax_varlen_attention_backward", eager_entmax_varlen.backward, "CompositeExplicitAutograd"
)
