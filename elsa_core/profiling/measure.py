"""Whole models timed side by side, and how sure the difference between two of them is.

All contenders take turns (`elsa_core.bench.timing.interleaved`), so that what else happens on the
machine meets all of them. A difference is judged by the ratio within each round: the median of
these ratios, with a bootstrap interval.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import torch

from elsa_core.bench import timing
from elsa_core.bench.results import digits, percentile
from elsa_core.bench.timing import Contender

CONFIDENCE: Final = 0.95
FEWEST_ROUNDS: Final = 6
"""Rounds below which no interval is trusted: the extremes of 5 values hold the median in 94%."""
_RESAMPLES: Final = 1000
_MOST_ROUNDS: Final = 2000
_SECONDS: Final = 2.0  # that the rounds take at least
_NARROW: Final = 0.01  # half the width of an interval at which more rounds add nothing
_BUSY_BATCHES: Final = 5
_BUSY_REPLAYS: Final = 5  # of a graph, between two events

FASTER: Final = "faster"
SLOWER: Final = "slower"
NO_DIFFERENCE: Final = "no difference"
UNSURE: Final = "unsure"


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one contender is as another, with its 95% interval.

    Attributes:
        value: median of the rounds' ratios; above 1 is faster.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"verdict": self.verdict}


def ratio(reference: Sequence[float], own: Sequence[float], seed: int = 0) -> Ratio:
    """How many times as fast `own` is as `reference`: seconds of the same rounds, in order.

    The interval is the percentile bootstrap of the median; the rounds are resampled whole, so that
    a round in which the machine was slow stays slow for both.
    """
    logs = np.log(np.asarray(reference, float)) - np.log(np.asarray(own, float))
    picks = np.random.default_rng(seed).integers(0, len(logs), (_RESAMPLES, len(logs)))
    medians = np.median(logs[picks], axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(medians, [tail, 100 - tail])
    value, low, high = (digits(float(np.exp(x))) for x in (np.median(logs), low, high))
    return Ratio(value, low, high, len(logs))


@dataclass(frozen=True)
class Sample:
    """One call of one contender, in seconds.

    `seconds` is what the caller waits, with the GPU's end awaited. On CUDA `host` is the time until
    the call returns and `device` the time between two events around it. `sites` holds the
    seconds spent in each watched module.
    """

    seconds: float
    host: float | None = None
    device: float | None = None
    sites: dict[str, float] = field(default_factory=dict)


class Clock(Protocol):
    """Watches parts of a contender's calls; see `elsa_core.profiling.sites`."""

    def reset(self) -> None:
        """Forget the calls so far."""

    def read(self) -> dict[str, float]:
        """Seconds in each part of the call since `reset`; the GPU has come to its end."""


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        rounds: samples of each contender at least. There are more until the interval of every ratio
            is within 1% on either side, and fewer where they exceed the budget.
        budget_seconds: time that the rounds of one configuration may take.
        seed: of inputs and of the bootstrap.
    """

    rounds: int = 20
    budget_seconds: float = 60.0
    seed: int = 0


Samples = dict[str, list[Sample]]


def take_samples(
    contenders: Sequence[Contender],
    device: torch.device,
    settings: Settings,
    clocks: Mapping[str, Clock] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Samples:
    """Call all contenders in turns, once a round; the others are related to the first one.

    A round is as short as can be: on a machine that others use too, two calls in a row meet the
    same conditions, two batches of calls do not.

    Args:
        contenders: whole models, called without arguments.
        device: where they run.
        settings: rounds and budget.
        clocks: by contender's name, what watches parts of its calls.
        progress: called with (rounds done, rounds expected).

    Returns:
        Samples by contender, as many of each; never under 3.
    """
    clocks = clocks or {}
    cost = 0.0
    for contender in contenders:
        single = timing.warmed_up(contender, 0.2 * settings.budget_seconds / len(contenders))
        if device.type == "cuda":  # the host alone was seen so far
            single = min(_once(contender.call, device, None).seconds for _ in range(3))
        cost += single
    most = max(3, min(_MOST_ROUNDS, int(0.8 * settings.budget_seconds / cost)))
    planned = min(settings.rounds, most)
    # Noise has a rhythm of its own: rounds that are over in a moment would all meet one beat.
    planned = max(planned, min(most, int(_SECONDS / cost)))
    checkpoint = planned
    end = time.perf_counter() + 0.8 * settings.budget_seconds

    def sample(contender: Contender) -> Sample:
        return _once(contender.call, device, clocks.get(contender.name))

    def enough(samples: Samples) -> bool:
        nonlocal checkpoint
        done = len(samples[contenders[0].name])
        if progress is not None:
            progress(done, max(done, checkpoint))
        if done >= 3 and time.perf_counter() > end:
            return True  # calls take longer than when they were gauged
        if done < checkpoint:
            return False
        checkpoint = min(most, math.ceil(1.5 * done))
        return _all_narrow(samples, contenders[0].name)

    # Whoever follows its equal finds the caches warm: in a circle that is always the same one, and
    # a model measured 2 to 5% faster than itself.
    order = random.Random(settings.seed)  # noqa: S311
    return timing.interleaved(contenders, most, sample, enough, order)


def _once(call: Callable[[], object], device: torch.device, clock: Clock | None) -> Sample:
    """One call, awaited, and what its clock saw of it."""
    if clock is not None:
        clock.reset()
    found = _once_cuda(call, device) if device.type == "cuda" else Sample(timing.timed(call, 1))
    return found if clock is None else replace(found, sites=clock.read())


def _once_cuda(call: Callable[[], object], device: torch.device) -> Sample:
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    call()
    end.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize(device)
    waited = time.perf_counter() - start
    return Sample(waited, host, float(begin.elapsed_time(end)) / 1e3)


def _all_narrow(samples: Samples, reference: str) -> bool:
    base = [s.seconds for s in samples[reference]]
    found = (ratio(base, [s.seconds for s in own]) for n, own in samples.items() if n != reference)
    return all(math.log(r.high / r.low) < 2 * _NARROW for r in found)


@dataclass(frozen=True)
class Spread:
    """Median, percentiles and relative spread of some samples, in seconds."""

    seconds: float
    p10: float
    p90: float

    @property
    def relative(self) -> float:
        """Distance of the percentiles over the median."""
        return digits((self.p90 - self.p10) / self.seconds)


def spread(seconds: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile."""
    middle = statistics.median(seconds)
    return Spread(digits(middle), *(digits(percentile(seconds, share)) for share in (0.1, 0.9)))


def memory_bytes(contender: Contender, device: torch.device) -> int | None:
    """Growth of memory at the peak of one call, its output included; weights are there before.

    CUDA: PyTorch's allocator. CPU: the process's resident set, every allocator counted; None where
    the system has no resettable peak.
    """
    if device.type == "cuda":
        return timing.workspace_cuda(contender, 0)
    return timing.workspace_cpu(contender, 0)


def busy_seconds(contender: Contender, *, is_graph: bool) -> float | None:
    """Seconds of the GPU for one call that follows another: of its CUDA graph (CUDA).

    None where no graph holds the call. The profiler, which would sum its kernels, stays out of
    this: from its first use on CUPTI slows down every launch of the process.
    """
    with contender.context(), torch.inference_mode():
        try:
            replay = contender.call if is_graph else timing.captured(contender.call)
        except RuntimeError:
            return None
        return statistics.median(_replayed(replay) for _ in range(_BUSY_BATCHES))


def _replayed(replay: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()  # the host is ahead of the GPU from here on
    begin.record()
    for _ in range(_BUSY_REPLAYS):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _BUSY_REPLAYS


def bound_by(latency: float, host: float | None, busy: float | None) -> str:
    """ "host" where the GPU idles for want of launches, "device" where it does not, "" unknown.

    The host binds where it spends most of a call launching, and the kernels themselves take clearly
    less than the caller waits.
    """
    if host is None or busy is None:
        return ""
    return "host" if busy < 0.8 * latency and host > 0.6 * latency else "device"
