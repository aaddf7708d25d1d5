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

from typing import Any

from torch import Tensor

from elsa_core.backends import eager
from elsa_core.backends.philox import Dropout
from elsa_core.ops.attention import record as plain
from elsa_core.ops.factory import Operator, register
from elsa_core.ops.formulas import Formulas

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float scale, str precision, float dropout_p, Tensor seed) -> (Tensor, Tensor)"
)


def reference(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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


FORMULAS = Formulas(
    "attention_dropout", _SCHEMA, plain.ATTENTION.terms, reference_backward, saved=("out", "lse"),
    like=3, again=reference_backward,
)  # fmt: skip
ATTENTION_DROPOUT = register(
    Operator(
        name="attention_dropout",
        schema=_SCHEMA,
        reference=reference,
        fake=_fake,
        gradients=FORMULAS.gradients,
        terms=plain.ATTENTION.terms,
        twin=True,
    )
)
