"""What the records of operators say of `elsa bench attention`, each in its `bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from elsa_core import reference
from elsa_core.measuring.timing import Contender
from elsa_core.profiling.bench import cases, peers
from elsa_core.profiling.bench.cases import Case
from elsa_core.profiling.bench.peers import Inputs


def _exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return reference.attention(query, key, value, mask)[0]


@dataclass(frozen=True)
class Bench:
    """How an operator is measured.

    Attributes:
        tables: its cases by device type ("cpu", "cuda") and table; no other operator's tables have
            these names.
        elsa: the call of elsa's: (case, inputs, precision, backend).
        peers: who else computes it: (case, inputs, whether to compile FlexAttention); of each name
            what makes the contender, or the reason why it cannot take part.
        exact: the output in float64, of (query, key, value, mask).
        error: of (case, output, float64 output); None for the relative L2 distance, of a part of
            the output where the whole would take long.
    """

    tables: Mapping[str, Mapping[str, tuple[Case, ...]]]
    elsa: Callable[[Case, Inputs, str, str], Contender]
    peers: Callable[[Case, Inputs, bool], Mapping[str, Callable[[], Contender] | str]] = (
        peers.of_attention
    )
    exact: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = _exact
    error: Callable[[Case, Tensor, Tensor], float] | None = None


ATTENTION = Bench({"cpu": cases.CPU_TABLES, "cuda": cases.CUDA_TABLES}, peers.elsa_attention)
WINDOW = Bench({"cpu": cases.CPU_WINDOW_TABLES}, peers.elsa_windows)
