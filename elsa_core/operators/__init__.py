"""The operators of elsa, one record each; importing this package defines them."""

from __future__ import annotations

from elsa_core.operators.attention import ATTENTION
from elsa_core.operators.attention_dropout import ATTENTION_DROPOUT
from elsa_core.operators.entmax import ENTMAX_ATTENTION
from elsa_core.operators.entmax_varlen import ENTMAX_VARLEN_ATTENTION
from elsa_core.operators.gated_linear import GATED_LINEAR
from elsa_core.operators.linear import LINEAR, SPLIT_WEIGHT
from elsa_core.operators.record import Backward, Gradients, Operator, of, record, records, register
from elsa_core.operators.sparse import SPARSE_ATTENTION
from elsa_core.operators.varlen import VARLEN_ATTENTION
from elsa_core.operators.window import WINDOW_ATTENTION

__all__ = [
    "ATTENTION",
    "ATTENTION_DROPOUT",
    "ENTMAX_ATTENTION",
    "ENTMAX_VARLEN_ATTENTION",
    "GATED_LINEAR",
    "LINEAR",
    "SPARSE_ATTENTION",
    "SPLIT_WEIGHT",
    "VARLEN_ATTENTION",
    "WINDOW_ATTENTION",
    "Backward",
    "Gradients",
    "Operator",
    "of",
    "record",
    "records",
    "register",
]
