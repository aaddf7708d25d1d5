"""The error of every run that is timed: of that very call, its batch and its inputs.

The oracle is the original in float64 on the same inputs, row by row, since attention in float64
takes memory. The rule is that of `check`: twice the error of "eager", and a rounding band.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elsa_core.base.inputs import chunks
from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError
from elsa_core.measuring.timing import Contender
from elsa_core.proof import TURBO_EPS, Comparison, floating_outputs, map_floating

REFERENCE = "eager"
_FACTOR = 2.0


class RunErrors(NamedTuple):
    """Relative Euclidean errors against float64 of the worst output of each run, why those of
    `wrong` are too large, and reasons to doubt the runs.
    """

    errors: dict[str, float]
    wrong: dict[str, str]
    warnings: tuple[str, ...] = ()


def run_errors(
    plain: nn.Module,
    contenders: Sequence[Contender],
    arguments: tuple[Any, ...],
    precision: str = "strict",
) -> RunErrors:
    """The errors of the contenders, "eager" among them."""
    try:
        with torch.inference_mode():
            outputs = {}
            for contender in contenders:
                with contender.context():
                    outputs[contender.name] = floating_outputs(contender.call())
        reference = outputs[REFERENCE]
        exact = _exact(copy.deepcopy(plain).double(), arguments, reference)
        errors, wrong = {}, {}
        turbo = precision == "turbo" and all(x.dtype == torch.float32 for x in reference.values())
        for name, found in outputs.items():
            eps = TURBO_EPS if turbo and name.startswith("patched") else None
            comparisons = {place: Comparison(_FACTOR, eps) for place in reference}
            for place, each in comparisons.items():
                each.add(exact[place], reference[place], found[place])
            worst = max(comparisons.values(), key=lambda each: each.excess)
            errors[name] = worst.patched_error
            if worst.patched_error > worst.allowed and name != REFERENCE:
                wrong[name] = worst.reason()
    except (ElsaError, RuntimeError, TypeError, ValueError, MemoryError, KeyError) as error:
        return RunErrors({}, {}, (f"the errors of the runs are not known: {first_line(error)}",))
    return RunErrors(errors, wrong, tuple(f"{name}: {why}" for name, why in wrong.items()))


def _exact(
    oracle: nn.Module, arguments: tuple[Any, ...], like: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What the oracle returns: of one row at a time where every output has the batch's rows."""
    batch, device = next(
        (x.shape[0], x.device) for x in arguments if isinstance(x, Tensor) and x.ndim
    )
    by_row = all(out.ndim and out.shape[0] == batch for out in like.values())
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        parts = [
            floating_outputs(oracle(*map_floating(rows, torch.float64)))
            for rows in chunks(arguments, 1 if by_row else batch)
        ]
        return {place: torch.cat([part[place] for part in parts]) for place in like}
