"""How sure a difference between two contenders is: ratios of rounds, and their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

CONFIDENCE: Final = 0.95
FEWEST_ROUNDS: Final = 6
"""Rounds below which no interval is trusted: the extremes of 5 values hold the median in 94%."""
_RESAMPLES: Final = 1000
_MANY: Final = 200  # rounds, beyond which fewer resamples say the same
_RESAMPLES_OF_MANY: Final = 400
_NARROW: Final = 0.01  # half the width of an interval at which more rounds add nothing
_USEFUL: Final = 0.05  # half the width of an interval that a verdict may have

FASTER: Final = "faster"
SLOWER: Final = "slower"
NO_DIFFERENCE: Final = "no difference"
UNSURE: Final = "unsure"


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one contender is as another, with its 95% interval.

    Attributes:
        value: quotient of the mean times over the middle half of the rounds; above 1 is faster.
        low, high: the bootstrap interval.
        rounds: how many ratios there were.
    """

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

    @property
    def narrow(self) -> bool:
        """The interval is within 1% on either side: more rounds add nothing."""
        return math.log(self.high / self.low) < 2 * _NARROW

    @property
    def decided(self) -> bool:
        """The verdict is "faster" or "slower", and clearly so.

        Rounds are looked at several times, so an interval that only just excludes 1 decides
        nothing: it has to lie off 1 by half of its own width, and to be within 5% on either side,
        or narrow beside what it says.
        """
        width = math.log(self.high / self.low)
        off = max(math.log(self.low), -math.log(self.high))
        return (
            self.rounds >= FEWEST_ROUNDS
            and off >= width / 2 > 0
            and (width < max(2 * _USEFUL, off / 2))
        )

    @property
    def within(self) -> float:
        """How far from 1 the interval reaches, as a share: 0.03 for 0.98 to 1.03."""
        return max(self.high, 1 / self.low) - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"verdict": self.verdict}


def ratio(
    reference: Sequence[float],
    own: Sequence[float],
    seed: int = 0,
    order: Sequence[float] | None = None,
) -> Ratio:
    """How many times as fast `own` is as `reference`: seconds of the same rounds.

    The quotient of the means over the middle half of the rounds (`order`, as for `middle_mean`;
    default: by the product of the two). The interval is the percentile bootstrap of that quotient;
    the rounds are resampled whole, so that a round in which the machine was slow stays slow for
    both.
    """
    pairs = np.asarray([reference, own], float)
    ranks = np.log(pairs).sum(0) if order is None else np.asarray(order, float)
    count = pairs.shape[1]
    resamples = _RESAMPLES if count <= _MANY else _RESAMPLES_OF_MANY
    picks = np.random.default_rng(seed).integers(0, count, (resamples, count))
    quotients = _quotients(pairs, ranks, picks)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(quotients, [tail, 100 - tail])
    value = _quotients(pairs, ranks, np.arange(count)[None])[0]
    return Ratio(digits(float(value)), digits(float(low)), digits(float(high)), count)


def _quotients(pairs: Any, ranks: Any, picks: Any) -> Any:
    """For each row of `picks` (rounds, by number) the quotient over its middle half."""
    placed = np.argsort(ranks[picks], axis=1, kind="stable")
    quarter = picks.shape[1] // 4
    kept = np.take_along_axis(picks, placed[:, quarter : picks.shape[1] - quarter], axis=1)
    sums = pairs[:, kept].sum(-1)
    return sums[0] / sums[1]


def middle_mean(values: Sequence[float], order: Sequence[float] | None = None) -> float:
    """Mean over the middle half of the rounds.

    Means of parts add up to the mean of the whole, which medians do not, and outliers stay out.

    Args:
        values: one of each round.
        order: what the rounds are ranked by, the same for all whose means are compared; default:
            the values.
    """
    ranks = np.asarray(values if order is None else order, float)
    quarter = len(ranks) // 4
    kept = np.argsort(ranks, kind="stable")[quarter : len(ranks) - quarter]
    return float(np.asarray(values, float)[kept].mean())


def round_order(contenders: Sequence[Sequence[float]]) -> list[float]:
    """What rounds are ranked by: the mean logarithm of all contenders' seconds in each."""
    return [float(x) for x in np.log(np.asarray(contenders, float)).mean(0)]


@dataclass(frozen=True)
class Spread:
    """Mean of the middle half, percentiles and relative spread of some samples, in seconds."""

    seconds: float
    p10: float
    p90: float

    @property
    def relative(self) -> float:
        """Distance of the percentiles over the mean."""
        return digits((self.p90 - self.p10) / self.seconds)


def spread(seconds: Sequence[float], order: Sequence[float] | None = None) -> Spread:
    """`middle_mean`, 10th and 90th percentile."""
    middle = middle_mean(seconds, order)
    return Spread(digits(middle), *(digits(percentile(seconds, share)) for share in (0.1, 0.9)))


def percentile(samples: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of some samples; `share` in 0 to 1."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def digits(number: float) -> float:
    """Six significant digits: more than any timer gives, and short in a file."""
    return float(f"{number:.6g}")
