"""The operator `elsa::attention_dropout` and its gradients `elsa::attention_dropout_backward`.

As `elsa::attention` (`elsa_core.ops.attention.record` has layouts and results) with two terms more:
`dropout_p` in [0, 1], and `seed`, int64 [2], the seed and the offset of the keep mask that
`elsa_core.backends.philox` defines. The weights after softmax are multiplied by keep / (1 - p), all
by 0 for p = 1; lse is that without dropout. The gradients compute the mask again: nothing of size
Nq x Nk is saved. An operator of its own, so that programs and bundles, which hold
`elsa::attention`, never hold dropout.

`seed` is drawn outside (`philox.draw`), so that the operator is a function of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from elsa_core.backends import eager
from elsa_core.backends.philox import Dropout
from elsa_core.ops.attention import record as plain
from elsa_core.ops.factory import Backward, Gradients, Grads, Operator, needed, register

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float scale, str precision, float dropout_p, Tensor seed) -> (Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor out, Tensor lse, bool is_causal, float scale, str precision, "
    "float dropout_p, Tensor seed, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)"
)
_OPERANDS = 8  # tensors in front of the gradients' arguments


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    precision: str,
    dropout_p: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """The operator in plain PyTorch."""
    dropout = Dropout(dropout_p, seed)
    return eager.attention(
        query, key, value, attn_mask, is_causal, scale, precision, dropout=dropout
    )


def reference_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its gradients in plain PyTorch."""
    *terms, dropout_p, seed, needs = arguments
    return eager.backward(*terms, needs, dropout=Dropout(dropout_p, seed))


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    return plain.fake(*arguments[:7])


def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *terms, _, _, needs = arguments
    return plain.backward_fake(*(*terms, needs))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *operands, is_causal, scale, precision, dropout_p, seed = inputs
    ctx.set_materialize_grads(False)  # None then means no gradient of lse, not zeros
    ctx.save_for_backward(*operands, *output, seed)
    ctx.terms = (is_causal, scale, precision, dropout_p)


def _backward(operator: Any, ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Grads:
    """The gradients of `elsa::attention_dropout`: only those that are wanted are computed."""
    *saved, seed = ctx.saved_tensors  # once: a checkpoint that is not reentrant gives them one time
    needs = list(ctx.needs_input_grad[:4])
    slopes = plain.slopes(grad_out, grad_lse, *saved[4:])
    grads = operator(*slopes, *saved, *ctx.terms, seed, needs)
    return *needed(grads, needs), None, None, None, None, None


def _twice_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *terms, seed, needs = inputs[_OPERANDS:]
    ctx.save_for_backward(*inputs[:_OPERANDS], seed)
    ctx.terms = (terms, needs)


def _twice(ctx: Any, *grads: Tensor) -> Grads:
    """Second derivatives: the backward once more, recorded, with all its weights alive."""
    *operands, seed = ctx.saved_tensors
    terms, needs = ctx.terms

    def again(*given: Tensor) -> Sequence[Tensor]:
        return reference_backward(*given, *terms, seed, needs)

    return plain.twice(ctx, operands, again, grads)


ATTENTION_DROPOUT = register(
    Operator(
        name="attention_dropout",
        schema=_SCHEMA,
        reference=reference,
        fake=_fake,
        gradients=Gradients(
            setup_context=_setup_context,
            formula=_backward,
            backward=Backward(
                schema=_BACKWARD_SCHEMA,
                fake=_backward_fake,
                reference=reference_backward,
                formula=_twice,
                setup_context=_twice_setup_context,
            ),
        ),
        terms=plain.ATTENTION.terms,
        twin=True,
    )
)
