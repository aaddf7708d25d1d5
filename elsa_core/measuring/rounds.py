"""Contenders timed side by side, round by round, until the difference is known or time is over.

All of them take turns (`elsa_core.measuring.timing.interleaved`), so that what else happens on the
machine meets all alike; `elsa_core.measuring.intervals` says what a difference is worth.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, SupportsIndex

import torch

from elsa_core.errors import ArgumentError
from elsa_core.graphs import capture
from elsa_core.measuring import timing
from elsa_core.measuring.intervals import ratio
from elsa_core.measuring.timing import Contender

_FEWEST: Final = 3
_MOST_ROUNDS: Final = 2000
_SECONDS: Final = 2.0  # that the rounds take at least
_WARM_UP: Final = 0.2  # of the budget, at most
_SLOW: Final = 0.02  # of the budget, that a call which needs no warming up takes at least
_ROUNDS_END: Final = 0.9  # of the budget; memory and energy come after the rounds
_BUSY_BATCHES: Final = 5
_BUSY_REPLAYS: Final = 5  # of a graph, between two events


@dataclass(frozen=True)
class Sample:
    """One call of one contender, in seconds.

    `seconds` is what the caller waits, with the GPU's end awaited, and `span` what the sites are
    part of: on CUDA the time between two events around the call, else the same. On CUDA `host` is
    the time until the call returns. `sites` holds the seconds spent in each watched module.
    """

    seconds: float
    span: float
    host: float | None = None
    sites: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """How to measure: samples of each contender at least, fewer where they exceed the budget, which
    is for warming up and rounds. Raises TypeError and ArgumentError.

    `decide`: end as soon as every interval decides; otherwise there are more rounds until every
    interval is within 1% on either side (`Ratio.suffices`).
    """

    rounds: int = 20
    budget_seconds: float = 60.0
    seed: int = 0
    decide: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.rounds, SupportsIndex)
        if not whole or not isinstance(self.budget_seconds, int | float):
            raise TypeError("profile: rounds must be a whole number and budget_seconds a number")
        if not isinstance(self.seed, SupportsIndex):
            raise TypeError(f"seed must be a whole number, not {type(self.seed).__name__}")
        if self.rounds < 1 or not self.budget_seconds > 0 or operator.index(self.seed) < 0:
            raise ArgumentError(
                "profile: rounds and budget_seconds must be positive, and seed not negative"
            )


Samples = dict[str, list[Sample]]
Clock = Callable[[], dict[str, float]]
"""Seconds of each part of a contender's last call; the GPU has come to its end."""


def take_samples(
    contenders: Sequence[Contender],
    device: torch.device,
    settings: Settings,
    clocks: Mapping[str, Clock] | None = None,
    progress: Callable[[int, int], None] | None = None,
    first: Mapping[str, float] | None = None,
) -> Samples:
    """Call all contenders in turns, once a round; the others are related to the first one.

    A round is as short as can be: on a machine that others use too, two calls in a row meet the
    same conditions, two batches of calls do not. There are as many samples of each, never under 3.
    `clocks`: by name, what times parts of a contender's calls. `first`: seconds of calls that were
    made before; one that takes 2% of the budget is not made again to warm up.
    """
    clocks = clocks or {}
    end = time.perf_counter() + _ROUNDS_END * settings.budget_seconds
    cost = _round_seconds(contenders, device, settings.budget_seconds, first or {})
    start = time.perf_counter()
    most = max(_MOST_ROUNDS, settings.rounds)
    affordable = max(_FEWEST, int(min(most, (end - start) / cost)))  # if the cost is right
    # Noise has a rhythm of its own: rounds that are over in a moment would all meet one beat.
    checkpoint = max(min(settings.rounds, affordable), min(affordable, int(_SECONDS / cost)))

    def enough(samples: Samples) -> bool:
        nonlocal checkpoint
        done = len(samples[contenders[0].name])
        if progress is not None:
            progress(done, max(done, checkpoint))
        now = time.perf_counter()
        if done >= _FEWEST and now + (now - start) / done > end:
            return True  # the next round would not end in time
        if done < checkpoint:
            return False
        checkpoint = math.ceil(1.5 * done)
        base, *others = ([each.seconds for each in own] for own in samples.values())
        found = (ratio(base, own) for own in others)
        return all(each.suffices(decide=settings.decide) for each in found)

    return timing.interleaved(
        contenders, most,
        lambda each: _once(each.call, device, clocks.get(each.name)), enough, settings.seed,
    )  # fmt: skip


def _round_seconds(
    contenders: Sequence[Contender], device: torch.device, budget: float, first: Mapping[str, float]
) -> float:
    """Warm the contenders up; seconds that one call of each takes."""
    cost = 0.0
    for contender in contenders:
        known = first.get(contender.name, 0.0)
        if known > _SLOW * budget:
            cost += known
            continue
        single = timing.warmed_up(contender, _WARM_UP * budget / len(contenders))
        if device.type == "cuda":  # the host alone was seen so far
            with contender.context(), torch.inference_mode():
                single = min(_once(contender.call, device, None).seconds for _ in range(3))
        cost += single
    return max(cost, 1e-9)


def _once(call: Callable[[], object], device: torch.device, clock: Clock | None) -> Sample:
    """One call, awaited, and what its clock saw of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start, begin = time.perf_counter(), timing.mark(device)
        call()
        end, host = timing.mark(device), time.perf_counter() - start
        torch.cuda.synchronize(device)
        waited = time.perf_counter() - start
        found = Sample(waited, timing.between(begin, end), host)
    else:
        waited = timing.timed(call, 1)
        found = Sample(waited, waited)
    return found if clock is None else replace(found, sites=clock())


def busy_seconds(contender: Contender, *, is_graph: bool) -> float | None:
    """Seconds of the GPU for one call that follows another: of its CUDA graph (CUDA).

    None where no graph holds the call.
    """
    with contender.context(), torch.inference_mode():
        try:
            replay = contender.call if is_graph else capture.captured(contender.call)
        except RuntimeError:
            return None
        device, batches = torch.device("cuda"), []
        for _ in range(_BUSY_BATCHES):
            replay()  # the host is ahead of the GPU from here on
            begin = timing.mark(device)
            for _ in range(_BUSY_REPLAYS):
                replay()
            end = timing.mark(device)
            torch.cuda.synchronize()
            batches.append(timing.between(begin, end) / _BUSY_REPLAYS)
    return statistics.median(batches)


def bound_by(latency: float, host: float | None, busy: float | None) -> str:
    """ "host" where the GPU idles for want of launches, "device" where it does not, "" unknown.

    The host binds where it spends most of a call launching, and the kernels themselves take clearly
    less than the caller waits.
    """
    if host is None or busy is None:
        return ""
    return "host" if busy < 0.8 * latency and host > 0.6 * latency else "device"
