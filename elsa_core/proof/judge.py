"""Judging one case: the comparisons of its outputs, over as many samples as it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from elsa_core.errors import ModelError
from elsa_core.proof.compare import Comparison, Top1, floating_outputs, is_classification

# Two errors of n normal values, equally good, differ by more than 2x once in 10^4 draws at n = 32
# and once in 30 at n = 8: an output with fewer values is judged on nearby inputs as well.
MIN_VALUES = 32

# Samples of a case, where the first alone condemns the patched model. Two equally good errors that
# one dot product dominates differ by more than 2x once in 3 with one sample, once in 40 with 10 and
# once in 10^4 with 32.
SITE_SAMPLES = 32
MODEL_SAMPLES = 10

# After 8 samples, two equally good errors differ by more than 10x once in 10^7: no more are run.
_HOPELESS_SAMPLES = 8
_HOPELESS = 5.0


@dataclass
class Judgement:
    """What is known of one case so far: of a model by one path, of a site, or of gradients.

    `factor` times the original's own error is allowed, and `bound` beside that where sparsity is
    granted it; `eps` sets the ulp where it is not the dtype's (turbo); `error` is what the patched
    code raised.
    """

    factor: float
    eps: float | None = None
    bound: float = 0.0
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    top1: Top1 = field(default_factory=Top1)
    error: str = ""

    def add(self, exact: Any, one: Any, two: Any, *, top1: bool = False) -> None:
        """Takes what the oracle, the original and the patched code returned for one input."""
        exacts, ones, twos = (floating_outputs(output) for output in (exact, one, two))
        if not ones:
            raise ModelError("check: the original returns no floating tensor to compare")
        self.add_tensors(exacts, ones, twos)
        alike = isinstance(two, Tensor) and is_classification(one) and one.shape == two.shape
        if top1 and alike:
            self.top1.add(exact, one, two)

    def add_tensors(
        self, exacts: Mapping[str, Tensor], ones: Mapping[str, Tensor], twos: Mapping[str, Tensor]
    ) -> None:
        for name, expected in ones.items():
            comparison = self.comparisons.setdefault(
                name, Comparison(self.factor, self.eps, bound=self.bound)
            )
            if name not in twos:
                comparison.mismatch = f"{name} is missing from what the patched code returns"
            else:
                comparison.add(exacts[name], expected, twos[name])

    def grant(self, bound: float) -> None:
        """Allow the error of sparsity, also to what was compared before."""
        self.bound = bound
        for comparison in self.comparisons.values():
            comparison.bound = bound

    @property
    def in_doubt(self) -> bool:
        """Whether finite errors condemn the patched code on the samples so far."""
        return any(comparison.in_doubt for comparison in self.comparisons.values())

    @property
    def too_few(self) -> int:
        """How many further samples an output of few values needs."""
        values = max((c.values for c in self.comparisons.values()), default=MIN_VALUES)
        return math.ceil(MIN_VALUES / max(values, 1)) - 1

    @property
    def is_hopeless(self) -> bool:
        """Whether an error is so far beyond what is allowed that 8 samples are enough."""
        return any(each.excess > _HOPELESS for each in self.comparisons.values())


def settle(judgements: Iterable[Judgement], samples: int, again: Callable[[int], None]) -> None:
    """Takes more samples for judgements that one sample alone condemns: up to `samples` in all, 8
    where the errors are far beyond what is allowed. `again` adds one more to each of them, given
    its seed."""
    several = [each for each in judgements if each.in_doubt]
    for seed in range(1, samples if several else 1):
        again(seed)
        for each in several:
            for comparison in each.comparisons.values():
                comparison.samples = seed + 1
        if seed + 1 >= _HOPELESS_SAMPLES and all(each.is_hopeless for each in several):
            break
