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

What is saved is (out, lse), O(N) beside the output, not (m, log S): P = exp(score - lse), and the
rounding of lse, 2**-24 |lse| at most, is a relative error of P. For |lse| <= 2**11 that is below
2**-13 in float32, no more than what half precision rounds, and for the |lse| < 2**5 of trained
models below 2**-19. Of larger ones the formulas in plain PyTorch compute (m, S) again in a first
pass over the keys; at |lse| >= 2**24 lse has lost all of log S. Dropout is no argument: it is
`elsa::attention_dropout`, so that programs and bundles never hold it.

A native library that is loaded without this package (a bundle, a program) defines
`elsa::attention` itself; loaded by this package it leaves that to this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager
from elsa_core.base import calls
from elsa_core.ops.attention import portable
from elsa_core.ops.factory import Backward, Gradients, Grads, Operator, needed, register

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float scale, str precision) -> (Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor out, Tensor lse, bool is_causal, float scale, str precision, "
    "bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)"
)


def fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    precision: str,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty((batch, heads, length), dtype=lse_dtype)


def backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (
        torch.empty_like(t) if needed else query.new_empty(0)
        for t, needed in zip((query, key, value), needs[:3], strict=True)
    )
    grad_mask = query.new_empty(0)
    if attn_mask is not None and needs[3]:
        grad_mask = torch.empty_like(attn_mask, memory_format=torch.contiguous_format)
    return grad_query, grad_key, grad_value, grad_mask


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, *terms = inputs
    ctx.set_materialize_grads(False)  # None then means no gradient of lse, not zeros
    ctx.save_for_backward(query, key, value, attn_mask, *output)
    ctx.terms = terms


def _backward(operator: Any, ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Grads:
    """The gradients of `elsa::attention`: only those that are wanted are computed."""
    saved = ctx.saved_tensors  # once: a checkpoint that is not reentrant gives them one time
    needs = list(ctx.needs_input_grad[:4])
    grads = operator(*slopes(grad_out, grad_lse, *saved[4:]), *saved, *ctx.terms, needs)
    return *needed(grads, needs), None, None, None


class Eager(torch.autograd.Function):
    """`elsa::attention` by the first argument, its gradients by the second, which take what the two
    operators take. See `elsa_core.dispatch.gradients.recorded`."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, backward: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = kernel(*inputs)
        _setup_context(ctx, inputs, out)
        ctx.compute = backward
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Grads:
        compute = ctx.compute
        if calls.by_operator(grad_out, grad_lse):
            compute = torch.ops.elsa.attention_backward.default
        saved = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[2:6])
        grads = compute(*slopes(grad_out, grad_lse, *saved[4:]), *saved, *ctx.terms, needs)
        return None, None, *needed(grads, needs), None, None, None


def slopes(
    grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of out and lse as the operators of gradients take them."""
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is None:
        grad_lse = lse.new_zeros(0) if lse.device.type == "cuda" else torch.zeros_like(lse)
    return grad_out, grad_lse


def _twice_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.terms = inputs[8:]


def _twice(ctx: Any, *grads: Tensor) -> Grads:
    """Second derivatives of `elsa::attention`."""
    return twice(ctx, ctx.saved_tensors, lambda *given: eager.backward(*given, *ctx.terms), grads)


def twice(
    ctx: Any,
    given: Sequence[Tensor],
    again: Callable[..., Sequence[Tensor]],
    grads: Sequence[Tensor],
) -> Grads:
    """Second derivatives: the backward once more, recorded, with all its weights alive.

    Args:
        ctx: of an operator of gradients, the first of whose arguments are `given`.
        given: the tensors that may be differentiated.
        again: computes the operator's results from them.
        grads: of the results.
    """
    count = len(given)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that what is differentiated ends here and yet hangs on the caller's graph.
        operands = [
            t.view_as(t) if needed else t
            for t, needed in zip(given, ctx.needs_input_grad[:count], strict=True)
        ]
        results = again(*operands)
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:count]) if needed]
    ends = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    second = torch.autograd.grad(
        [r for r, _ in ends],
        [operands[i] for i in wanted],
        [g for _, g in ends],
        create_graph=create_graph,
        allow_unused=True,
    )
    for i, grad in zip(wanted, second, strict=True):
        found[i] = grad
    return tuple(found)


ATTENTION = register(
    Operator(
        name="attention",
        schema=_SCHEMA,
        reference=eager.attention,
        portable=portable.attention,
        fake=fake,
        gradients=Gradients(
            setup_context=_setup_context,
            formula=_backward,
            backward=Backward(
                schema=_BACKWARD_SCHEMA,
                fake=backward_fake,
                reference=eager.backward,
                formula=_twice,
                setup_context=_twice_setup_context,
            ),
        ),
        kind="attention",
        terms=("query", "key", "value", "attn_mask"),
        twin=True,
        onnx="elsa_core.exporting.onnx_attention:EXPORT",
        bench="elsa_core.profiling.bench.operators:ATTENTION",
        bench_gradients="elsa_core.profiling.bench.gradients:GRADIENTS",
    )
)
