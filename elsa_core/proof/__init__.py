"""Whether a patched model computes what the original does, judged against float64.

The names below are what other packages import; every other name of this package is its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from elsa_core.base import lazy

if TYPE_CHECKING:
    from elsa_core.proof.accuracy import EvalReport, evaluate
    from elsa_core.proof.checking import check
    from elsa_core.proof.compare import (
        TURBO_EPS,
        Comparison,
        Norms,
        floating_outputs,
        map_floating,
    )  # fmt: skip
    from elsa_core.proof.labelled import LabelledImages, labelled_images
    from elsa_core.proof.paths import chosen
    from elsa_core.proof.report import CheckReport
    from elsa_core.proof.samples import nudged
    from elsa_core.proof.sides import exactly

_HOMES = {
    "accuracy": ("EvalReport", "evaluate"),
    "checking": ("check",),
    "compare": ("TURBO_EPS", "Comparison", "Norms", "floating_outputs", "map_floating"),
    "labelled": ("LabelledImages", "labelled_images"),
    "sides": ("exactly",),
    "paths": ("chosen",),
    "report": ("CheckReport",),
    "samples": ("nudged",),
}

__all__ = [
    "TURBO_EPS", "CheckReport", "Comparison", "EvalReport", "LabelledImages", "Norms", "check",
    "chosen", "evaluate", "exactly", "floating_outputs", "labelled_images", "map_floating",
    "nudged",
]  # fmt: skip

__getattr__ = partial(lazy.attribute, __name__, _HOMES)
