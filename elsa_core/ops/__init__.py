"""The operators of elsa, one record each; importing this package defines them."""

from __future__ import annotations

from elsa_core.ops.attention.record import ATTENTION, ATTENTION_DROPOUT
from elsa_core.ops.entmax.record import ENTMAX_ATTENTION, ENTMAX_VARLEN_ATTENTION
from elsa_core.ops.factory import BY_SCHEMA, RECORDS, Backward, Operator, register
from elsa_core.ops.linear.record import GATED_LINEAR, LINEAR
from elsa_core.ops.sparse.record import SPARSE_ATTENTION
from elsa_core.ops.varlen.record import VARLEN_ATTENTION
from elsa_core.ops.window.record import WINDOW_ATTENTION

__all__ = [
    "ATTENTION",
    "ATTENTION_DROPOUT",
    "BY_SCHEMA",
    "ENTMAX_ATTENTION",
    "ENTMAX_VARLEN_ATTENTION",
    "GATED_LINEAR",
    "LINEAR",
    "RECORDS",
    "SPARSE_ATTENTION",
    "VARLEN_ATTENTION",
    "WINDOW_ATTENTION",
    "Backward",
    "Operator",
    "register",
]
