"""The operator `elsa::sparse_attention`: attention that leaves out tiles of negligible weights.

As `elsa::attention` (`elsa_core.ops.attention.record` has layouts and results) with two terms more.
A tile of keys is left out, of the sums and of the products with the values, where for each row of
a tile of queries its largest weight relative to the maximum so far is at most 2**threshold.
threshold: negative, -inf to leave out nothing, or 0 for `exact_threshold`. relief: a sum of
SUMMARIES, ORDER and FROZEN, how the maxima of rows are found; it changes what is computed, not what
it means, and kernels may ignore it.

Results: out, lse (that of the weights that are kept), and counts int64 [B, Hq, 5]: tiles of the
kernel's own size that the causal limit leaves, tiles left out, tiles whose row maxima were found,
states that were rescaled, and tiles of queries that were folded again because a frozen maximum did
not hold.

Gradients are those of `elsa::attention`, from out and lse; a threshold above the exact one has
none.

Sources: BLASST, arXiv 2512.12087 (tiles left out); VFA (maxima from summaries of keys, first and
local keys first, frozen).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager
from elsa_core.base import skipping
from elsa_core.ops.attention import record as plain
from elsa_core.ops.factory import Grads, Operator, implement, register
from elsa_core.ops.formulas import slopes_of

SUMMARIES, ORDER, FROZEN = 1, 2, 4
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float scale, "
    "str precision, float threshold, int relief) -> (Tensor, Tensor, Tensor)"
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, is_causal, scale, precision, threshold, _ = inputs
    out, lse, counts = output
    ctx.mark_non_differentiable(counts)
    ctx.set_materialize_grads(False)  # None then means no gradient of lse, not zeros
    ctx.save_for_backward(*operands, out, lse)
    ctx.terms = (is_causal, scale, precision)
    ctx.inexact = -math.inf < threshold < 0.0


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Grads:
    if ctx.inexact:
        raise RuntimeError('sparsity has gradients as "exact" alone, not with a number')
    saved = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    slopes = slopes_of(grad_out, grad_lse, *saved[4:])
    grads = torch.ops.elsa.attention_backward.default(*slopes, *saved, *ctx.terms, needs)
    found = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return *found, *(None,) * 5


SPARSE_ATTENTION = register(
    Operator(
        name="sparse_attention",
        schema=_SCHEMA,
        reference=eager.sparse_attention,
        fake=lambda query, *rest: (
            *plain.fake(query, *rest[:6]),
            query.new_empty((*query.shape[:2], skipping.COUNTS), dtype=torch.int64),
        ),
        setup_context=_setup_context,
        formula=_backward,
        kind="sparse",
        terms=plain.ATTENTION.terms,
        twin=True,
    )
)
# On devices without kernels of this operator the name stands for the reference too.
implement("sparse_attention", eager.sparse_attention, "CompositeExplicitAutograd")
