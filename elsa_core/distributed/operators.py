"""The operators `elsa::distributed_attention` and `elsa::gather_shards`, and their gradients'.

A compiler meets one opaque call, so that a caller compiles as a whole (`fullgraph=True`); the ranks
agree and talk when the call runs, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.distributed import agreement, groups, ways
from elsa_core.distributed.plan import plan
from elsa_core.distributed.shards import Rows, Saved, Wanted
from elsa_core.errors import ArgumentError
from elsa_core.ops.factory import Grads

_LIBRARY = torch.library.Library("elsa", "FRAGMENT")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    formula: Callable[..., Any] | None = None,
    context: Callable[..., None] | None = None,
) -> None:
    """Define `elsa::name` of a schema; formula and context are those of `register_autograd`."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"elsa::{name}", fake, lib=_LIBRARY)
    if formula is not None:
        torch.library.register_autograd(
            f"elsa::{name}", formula, setup_context=context, lib=_LIBRARY
        )


def define_attention(
    name: str,
    terms: str,
    call: Callable[..., Any],
    forward: Callable[[Any], tuple[Tensor, ...]],
    backward: Callable[[Any, Saved, Wanted], Sequence[Tensor | None]],
    fake: Callable[..., tuple[Tensor, ...]],
    *,
    results: str,
    refusal: str,
) -> None:
    """Define `elsa::<name>` of query, key, value, attn_mask and `terms`, and its gradients.

    results: names of what it gives, out and lse first. call: takes the arguments and, in the
    backward, the results behind lse; gives what `forward` and `backward` take. fake: gives fake
    results but for out, whose memory is [B, Nq, Hq, Dv]. refusal: the error of second derivatives.
    """
    saved = results.split()
    operands = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask"

    @torch.no_grad()
    def run_backward(grad_out: Tensor, grad_lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        inputs, (out, lse, *more) = arguments[:4], arguments[4 : 4 + len(saved)]
        *given, needs = arguments[4 + len(saved) :]
        # that of lse is [0] where nothing depends on it
        read = Saved(grad_out, out, lse, grad_lse if grad_lse.numel() else None)
        grads = backward(call(*inputs, *given, *more), read, Wanted(*needs))
        return tuple(
            grad_out.new_empty(0) if grad is None or t is None else grad.to(t.dtype).contiguous()
            for grad, t in zip(grads, inputs, strict=True)
        )

    def context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.terms = inputs[4:]

    def formula(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *rest: Tensor | None
    ) -> Grads:
        needs, tensors = list(ctx.needs_input_grad[:4]), ctx.saved_tensors
        out, lse = tensors[4:6]
        grads = getattr(torch.ops.elsa, f"{name}_backward")(
            torch.zeros_like(out) if grad_out is None else grad_out,
            lse.new_empty(0) if grad_lse is None else grad_lse,
            *tensors, *ctx.terms, needs,
        )  # fmt: skip
        found = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
        return *found, *(None for _ in ctx.terms)

    def once(ctx: Any, *grads: Tensor) -> Grads:
        raise ArgumentError(refusal)

    several = ", ".join("Tensor" for _ in saved)
    define(
        f"{name}({operands}, {terms}) -> ({several})",
        torch.no_grad()(lambda *arguments: forward(call(*arguments))),
        lambda query, key, value, *rest: (
            query.new_empty(
                (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
            ).transpose(1, 2),
            *fake(query, *rest),
        ),
        formula,
        context,
    )
    define(
        f"{name}_backward(Tensor grad_out, Tensor grad_lse, {operands}, "
        f"{', '.join(f'Tensor {each}' for each in saved)}, {terms}, bool[] needs) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        run_backward,
        lambda grad_out, grad_lse, *arguments: tuple(
            grad_out.new_empty(0) if t is None or not wanted else t.new_empty(t.shape)
            for t, wanted in zip(arguments[:4], arguments[-1], strict=True)
        ),
        once,
    )  # fmt: skip


def agreed_call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str, backend: str, method: str, gradients: str, lengths: Sequence[int],
    group: str, tokens: Tensor | None = None,
) -> ways.Call:  # fmt: skip
    """What the ranks agree on for a call of the operator, and how it is served.

    tokens: int64 [2, P], the lengths that the ranks agreed on in the forward of this call; without
    them they are asked.
    """
    process_group = groups.by_name(group)
    said = agreement.described(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale,
        precision=precision, backend=backend, method=method, gradients=gradients,
    )  # fmt: skip
    known = None if tokens is None else tokens.tolist()
    agreed = agreement.agree(process_group, said, query.device, lengths, known)
    start = sum(agreed.queries[: agreed.rank])
    rows = Rows(query, attn_mask, start, is_causal, scale, precision, backend)
    return ways.Call(rows, key, value, agreed, process_group, plan(agreed))


# lse and the lengths are saved for the gradients, and not given to callers
define_attention(
    "distributed_attention",
    "bool is_causal, float scale, str precision, str backend, str method, str gradients, "
    "int[] lengths, str group",
    agreed_call, ways.forward, ways.backward,
    lambda query, *terms: (
        query.new_empty(query.shape[:3], dtype=torch.float64),
        torch.empty((2, groups.by_name(terms[-1]).size()), dtype=torch.int64, device="cpu"),
    ),
    results="out lse tokens",
    refusal="elsa.distributed.attention is differentiable once",
)  # fmt: skip


def _gather(tokens: Tensor, lengths: Sequence[int], group: str) -> Tensor:
    """[B, n, C] of each rank -> [B, sum(lengths), C] of all, on every rank."""
    process_group = groups.by_name(group)
    batch, _, width = tokens.shape
    if process_group.size() == 1:
        return tokens.clone()
    sizes = [batch * length * width for length in lengths]
    rows = groups.gather(process_group, tokens.reshape(-1), sizes, "gathering tokens")
    pieces = zip(rows, lengths, strict=True)
    return torch.cat([row.view(batch, length, width) for row, length in pieces], 1)


def _gather_backward(grad: Tensor, lengths: Sequence[int], group: str) -> Tensor:
    """The sum over ranks, in their order, of their gradients of this rank's tokens [B, n, C]."""
    process_group = groups.by_name(group)
    world, own = process_group.size(), lengths[process_group.rank()]
    if world == 1:
        return grad.clone()
    shapes, parts = [(grad.shape[0], own, grad.shape[2])] * world, grad.split(list(lengths), 1)
    doing = "returning gradients of tokens"
    first, *others = groups.exchange(process_group, parts, shapes, doing)
    return sum(others, first)


define(
    "gather_shards(Tensor tokens, int[] lengths, str group) -> Tensor",
    _gather,
    lambda tokens, lengths, group: tokens.new_empty(
        (tokens.shape[0], sum(lengths), tokens.shape[2])
    ),
    lambda ctx, grad: (torch.ops.elsa.gather_shards_backward(grad, *ctx.terms), None, None),
    lambda ctx, inputs, output: setattr(ctx, "terms", inputs[1:]),
)  # fmt: skip
define(
    "gather_shards_backward(Tensor grad, int[] lengths, str group) -> Tensor",
    _gather_backward,
    lambda grad, lengths, group: grad.new_empty(
        (grad.shape[0], lengths[groups.by_name(group).rank()], grad.shape[2])
    ),
)
