"""The operators `elsa::distributed_attention` and `elsa::gather_shards`, and their gradients'.

A compiler meets one opaque call, so that a caller compiles as a whole (`fullgraph=True`); the ranks
agree and talk when the call runs, compiled or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.base.opaque import define
from elsa_core.distributed import agreement, groups, plan, ways
from elsa_core.distributed.shards import Rows, Saved, Wanted
from elsa_core.errors import ArgumentError
from elsa_core.ops.factory import Grads
from elsa_core.ops.formulas import needed


def agreed_call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *terms: Any,
    tokens: Tensor | None = None,
) -> tuple[ways.Call, plan.Plan]:  # fmt: skip
    """What the ranks agree on for a call of the operator, and how it is served.

    tokens: int64 [2, P], the lengths that the ranks agreed on in the forward of this call; without
    them they are asked.
    """
    is_causal, scale, precision, backend, method, gradients, lengths, group = terms
    process_group = groups.by_name(group)
    said = agreement.described(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale,
        precision=precision, backend=backend, method=method, gradients=gradients,
    )  # fmt: skip
    if tokens is None:
        agreed = agreement.agree(process_group, said, query.device, lengths)
    else:
        agreed = agreement.agreed_before(process_group, said, tokens.tolist())
    start = sum(agreed.queries[: agreed.rank])
    rows = Rows(query, attn_mask, start, is_causal, scale, precision, backend)
    return ways.Call(rows, key, value, agreed, process_group), plan.plan(agreed)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, how = agreed_call(*arguments)
    with torch.no_grad():
        out, lse = ways.forward(call, how.method)
    return out, lse.double(), torch.tensor([how.queries, how.keys])


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, *terms: Any
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
    world = groups.by_name(terms[-1]).size()
    tokens = torch.empty((2, world), dtype=torch.int64, device="cpu")
    return out, query.new_empty((batch, heads, length), dtype=torch.float64), tokens


def _backward(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *inputs, out, lse, tokens = arguments[:7]
    *terms, needs = arguments[7:]
    call, how = agreed_call(*inputs, *terms, tokens=tokens)
    with torch.no_grad():
        grads = ways.backward(call, how.method, Saved(grad_out, out, lse), Wanted(*needs))
    return tuple(
        grad_out.new_empty(0) if grad is None or t is None else grad.to(t.dtype).contiguous()
        for grad, t in zip(grads, inputs, strict=True)
    )


def _backward_fake(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(
        grad_out.new_empty(0) if t is None or not wanted else t.new_empty(t.shape)
        for t, wanted in zip(arguments[:4], arguments[-1], strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.terms = inputs[4:]


def _formula(ctx: Any, grad_out: Tensor | None, *others: Tensor | None) -> Grads:
    """The gradients. lse and the lengths are saved for them and not given to callers."""
    *inputs, out, lse, tokens = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    backward = torch.ops.elsa.distributed_attention_backward
    grads = backward(grad_out, *inputs, out, lse, tokens, *ctx.terms, needs)
    return *needed(grads, needs), *(None for _ in ctx.terms)


def _once(ctx: Any, *grads: Tensor) -> Grads:
    raise ArgumentError("elsa.distributed.attention is differentiable once")


_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask"
_TERMS = (
    "bool is_causal, float scale, str precision, str backend, str method, str gradients, "
    "int[] lengths, str group"
)
define(
    f"distributed_attention({_OPERANDS}, {_TERMS}) -> (Tensor, Tensor, Tensor)",
    _forward, _forward_fake, _formula, _setup_context,
)  # fmt: skip
define(
    f"distributed_attention_backward(Tensor grad_out, {_OPERANDS}, Tensor out, Tensor lse, "
    f"Tensor tokens, {_TERMS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward, _backward_fake, _once,
)  # fmt: skip


def _gather(tokens: Tensor, lengths: Sequence[int], group: str) -> Tensor:
    """[B, n, C] of each rank -> [B, sum(lengths), C] of all, on every rank."""
    process_group = groups.by_name(group)
    batch, _, width = tokens.shape
    if process_group.size() == 1:
        return tokens.clone()
    message = tokens.new_zeros((batch, max(lengths), width))
    message[:, : tokens.shape[1]] = tokens
    with groups.watching(process_group, "gathering tokens"):
        rows = groups.all_gather(process_group, message)
    return torch.cat([row[:, :length] for row, length in zip(rows, lengths, strict=True)], 1)


def _gather_backward(grad: Tensor, lengths: Sequence[int], group: str) -> Tensor:
    """The sum over ranks, in their order, of their gradients of this rank's tokens [B, n, C]."""
    process_group = groups.by_name(group)
    world, own = process_group.size(), lengths[process_group.rank()]
    if world == 1:
        return grad.clone()
    shape = (grad.shape[0], own, grad.shape[2])
    with groups.watching(process_group, "returning gradients of tokens"):
        first, *others = groups.exchange(
            process_group, grad.split(list(lengths), 1), [shape] * world
        )
    return sum(others, first)


def _gather_formula(ctx: Any, grad: Tensor) -> Grads:
    return torch.ops.elsa.gather_shards_backward(grad, *ctx.terms), None, None


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.terms = inputs[1:]


def _gather_fake(tokens: Tensor, lengths: Sequence[int], group: str) -> Tensor:
    return tokens.new_empty((tokens.shape[0], sum(lengths), tokens.shape[2]))


def _gather_backward_fake(grad: Tensor, lengths: Sequence[int], group: str) -> Tensor:
    return grad.new_empty((grad.shape[0], lengths[groups.by_name(group).rank()], grad.shape[2]))


define(
    "gather_shards(Tensor tokens, int[] lengths, str group) -> Tensor",
    _gather, _gather_fake, _gather_formula, _gather_context,
)  # fmt: skip
define(
    "gather_shards_backward(Tensor grad, int[] lengths, str group) -> Tensor",
    _gather_backward, _gather_backward_fake,
)  # fmt: skip
