"""Whether a patched model computes what the original does, judged against float64.

The names below are what other packages import; every other name of this package is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elsa_core import lazy

if TYPE_CHECKING:
    from elsa_core.proof.checking import check
    from elsa_core.proof.compare import (
        TURBO_EPS,
        Comparison,
        Norms,
        floating_outputs,
        map_floating,
    )
    from elsa_core.proof.dependence import depends
    from elsa_core.proof.oracle import exactly
    from elsa_core.proof.report import CheckReport
    from elsa_core.proof.samples import nudged, random_weight
    from elsa_core.proof.text import classes

_HOMES = {
    "checking": ("check",),
    "compare": ("TURBO_EPS", "Comparison", "Norms", "floating_outputs", "map_floating"),
    "dependence": ("depends",),
    "oracle": ("exactly",),
    "report": ("CheckReport",),
    "samples": ("nudged", "random_weight"),
    "text": ("classes",),
}

__all__ = [
    "TURBO_EPS",
    "CheckReport",
    "Comparison",
    "Norms",
    "check",
    "classes",
    "depends",
    "exactly",
    "floating_outputs",
    "map_floating",
    "nudged",
    "random_weight",
]


def __getattr__(name: str) -> Any:
    return lazy.attribute(__name__, _HOMES, name)
