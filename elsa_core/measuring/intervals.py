"""How sure a difference between two contenders is: ratios of rounds, and their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from elsa_core.measuring.documents import Plain

CONFIDENCE: Final = 0.95
FEWEST_ROUNDS: Final = 6
"""Rounds below which no interval is trusted: the extremes of 5 values hold the median in 94%."""
_RESAMPLES: Final = 1000
_NARROW: Final = 0.01  # half the width of an interval at which more rounds add nothing
_USEFUL: Final = 0.05  # half the width of an interval that a verdict may have

FASTER: Final = "faster"
SLOWER: Final = "slower"
NO_DIFFERENCE: Final = "no difference"
UNSURE: Final = "unsure"


@dataclass(frozen=True)
class Ratio(Plain):
    """How many times as fast one contender is as another, with its 95% interval.

    Attributes:
        value: median of the rounds' ratios, or quotient of the times reported; above 1 is faster.
        low, high: the interval, see `ratio`.
        rounds: how many ratios there were.
    """

    also = ("verdict",)
    value: float
    low: float
    high: float
    rounds: int

    @property
    def verdict(self) -> str:
        """ "faster", "slower", "no difference" (the interval holds 1) or "unsure" (few rounds)."""
        if self.rounds < FEWEST_ROUNDS:
            return UNSURE
        if self.low <= 1.0 <= self.high:
            return NO_DIFFERENCE
        return FASTER if self.low > 1.0 else SLOWER

    def suffices(self, *, decide: bool) -> bool:
        """More rounds add nothing: the interval is within 1% on either side; or, to `decide`, the
        verdict is "faster" or "slower", and clearly so.

        Rounds are looked at several times, so an interval that only just excludes 1 decides
        nothing: it has to lie off 1 by half of its own width, and to be within 5% on either side,
        or narrow beside what it says.
        """
        width = math.log(self.high / self.low)
        off = max(math.log(self.low), -math.log(self.high))
        clear = off >= width / 2 > 0 and width < max(2 * _USEFUL, off / 2)
        return self.rounds >= FEWEST_ROUNDS and (width < 2 * _NARROW or (decide and clear))


def ratio(
    reference: Sequence[float],
    own: Sequence[float],
    seed: int = 0,
    shown: tuple[float, float] | None = None,
) -> Ratio:
    """How many times as fast `own` is as `reference`: seconds of the same rounds, in order.

    The median of the rounds' ratios, and its percentile bootstrap; the rounds are resampled whole,
    so that a round in which the machine was slow stays slow for both.

    Args:
        reference, own: one of each round.
        seed: of the bootstrap.
        shown: the times of the two that are reported. Their quotient is then the value (250 ms and
            100 ms are 2.5x), and the interval is widened to hold it.
    """
    logs = np.log(np.asarray(reference, float)) - np.log(np.asarray(own, float))
    picks = np.random.default_rng(seed).integers(0, len(logs), (_RESAMPLES, len(logs)))
    medians = np.median(logs[picks], axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = (float(np.exp(x)) for x in np.percentile(medians, [tail, 100 - tail]))
    value = float(np.exp(np.median(logs))) if shown is None else shown[0] / shown[1]
    return Ratio(digits(value), digits(min(low, value)), digits(max(high, value)), len(logs))


def paired_times(seconds: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    """One time for each contender, such that their quotients are the medians of rounds' ratios.

    The reference's is its median. Another one's is that over the median of the rounds' ratios:
    on a machine that others use too, medians of two contenders may be of different moments.
    """
    base = np.log(np.asarray(seconds[reference], float))
    middle = float(np.median(base))
    return {
        name: float(np.exp(middle + np.median(np.log(np.asarray(own, float)) - base)))
        for name, own in seconds.items()
    }


def middle_means(order: Sequence[float], parts: Sequence[Sequence[float]]) -> list[float]:
    """Means over the middle half of the rounds, ranked by `order`.

    Means of parts add up to the mean of the whole, which medians do not, and outliers stay out.
    """
    quarter = len(order) // 4
    kept = np.argsort(np.asarray(order, float), kind="stable")[quarter : len(order) - quarter]
    return [float(np.asarray(part, float)[kept].mean()) for part in parts]


def percentile(samples: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of some samples; `share` in 0 to 1."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def digits(number: float) -> float:
    """Six significant digits: more than any timer gives, and short in a file."""
    return float(f"{number:.6g}")
