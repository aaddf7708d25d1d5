"""How sure a difference is: the interval of a ratio, the rounds, the words for them."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elsa_core.measuring import rounds, timing
from elsa_core.measuring.intervals import Ratio, paired_times, ratio
from elsa_core.measuring.rounds import Settings
from elsa_core.measuring.timing import Contender
from elsa_core.profiling.runs import variants

CPU = torch.device("cpu")


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """300 experiments with a known ratio, noise that both share, and outliers."""
    random, held = np.random.default_rng(0), 0
    for seed in range(300):
        shared = random.lognormal(0, 0.5, 40)
        own = shared * random.lognormal(0, 0.03, 40)
        reference = 1.1 * shared * random.lognormal(0, 0.03, 40)
        reference[random.random(40) < 0.05] *= 5
        found = ratio(list(reference), list(own), seed)
        held += found.low <= 1.1 <= found.high
    assert 0.92 <= held / 300 <= 0.99


def test_a_ratio_is_paired_and_says_what_it_is() -> None:
    slow = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]  # the machine slows down; both are hit alike
    found = ratio([2 * t for t in slow], slow)
    assert (found.value, found.low, found.high, found.verdict) == (2.0, 2.0, 2.0, "faster")
    assert ratio(slow, [2 * t for t in slow]).verdict == "slower"
    assert ratio(slow, slow[::-1]).verdict == "no difference"
    assert ratio([2.0] * 5, [1.0] * 5).verdict == "unsure"
    assert Ratio(1.0, 0.9, 1.1, 9).to_dict()["verdict"] == "no difference"


def test_samples_are_taken_in_turns_until_they_agree() -> None:
    order: list[str] = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    contenders = [
        Contender("a", lambda: call("a", 0.002)),
        Contender("b", lambda: call("b", 0.004)),
    ]
    samples = rounds.take_samples(contenders, CPU, Settings(rounds=8, budget_seconds=30.0))
    count = len(samples["a"])
    assert count == len(samples["b"]) >= 8
    turns = ["".join(order[i : i + 2]) for i in range(len(order) - 2 * count, len(order), 2)]
    assert set(turns) == {"ab", "ba"}  # nobody always follows the same one
    found = ratio([s.seconds for s in samples["b"]], [s.seconds for s in samples["a"]])
    assert 1.5 < found.value < 2.5


def test_a_budget_too_small_still_gives_three_rounds() -> None:
    contenders = [Contender(name, lambda: time.sleep(0.01)) for name in "ab"]
    samples = rounds.take_samples(contenders, CPU, Settings(rounds=100, budget_seconds=0.01))
    assert len(samples["a"]) == len(samples["b"]) == 3


@pytest.mark.alone
def test_warm_up_goes_on_while_calls_get_faster() -> None:
    waits = itertools.chain([0.05, 0.03, 0.015, 0.007], itertools.repeat(0.003))
    seen: list[float] = []

    def call() -> None:
        seen.append(next(waits))
        time.sleep(seen[-1])

    best = timing.warmed_up(Contender("slow start", call))
    assert seen[4] == 0.003
    assert best < 0.007
    seen.clear()
    timing.warmed_up(Contender("steady", lambda: seen.append(1.0)), budget_seconds=0.0)
    assert len(seen) == 2


def test_memory_is_what_a_call_really_takes() -> None:
    def call() -> Any:
        return torch.ones(64, 2**20)  # 256 MiB, written

    grown = timing.workspace(Contender("big", call), CPU)
    nothing = timing.workspace(Contender("none", lambda: None), CPU)
    if grown is None or nothing is None:
        pytest.skip("the peak of resident memory cannot be reset on this system")
    assert 256 * 2**20 <= grown < 280 * 2**20
    assert nothing < 4 * 2**20


@pytest.mark.parametrize(
    ("latency", "host", "busy", "word"),
    [
        (2.0, 1.9, 0.5, "host"),  # launching takes all the time
        (2.0, 1.9, 1.9, "device"),  # launching hides behind computing
        (2.0, 0.1, 1.5, "device"),  # a graph: the host does nothing
        (2.0, None, None, ""),
    ],
)
def test_what_binds_a_call(latency: float, host: Any, busy: Any, word: str) -> None:
    assert rounds.bound_by(latency, host, busy) == word


def test_a_graph_that_cannot_be_captured_is_left_out() -> None:
    built = variants.build(nn.Identity().eval(), nn.Identity(), (torch.ones(1),), ("eager+graph",))
    assert "CUDA graphs need an NVIDIA GPU" in built.left_out["eager+graph"]


class Clock:
    """Time that passes only where a call or this test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def contender(self, name: str, seconds: Callable[[], float]) -> Contender:
        def call() -> None:
            self.now += seconds()

        return Contender(name, call)


def noisy(clock: Clock, seed: int, middle: float, scatter: float) -> Callable[[], float]:
    random = np.random.default_rng(seed)
    return lambda: middle * float(random.lognormal(0, scatter))


def test_rounds_end_as_soon_as_the_interval_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.24x in calls of a quarter of a second: 20 of the 120 rounds that the budget holds."""
    clock = Clock(monkeypatch)
    pair = [
        clock.contender("eager", noisy(clock, 0, 0.257, 0.03)),
        clock.contender("patched", noisy(clock, 1, 0.207, 0.03)),
    ]
    samples = rounds.take_samples(pair, CPU, Settings(20, 60.0, decide=True))
    assert len(samples["eager"]) == 20 and clock.now < 20
    found = ratio(*([s.seconds for s in samples[name]] for name in ("eager", "patched")))
    assert found.verdict == "faster" and found.suffices(decide=True)
    assert not found.suffices(decide=False)
    start = clock.now
    longer = rounds.take_samples(pair, CPU, Settings(20, 60.0))
    assert len(longer["eager"]) > 40 and clock.now - start <= 60


def test_equal_models_are_measured_until_the_budget_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pair = [clock.contender(name, noisy(clock, seed, 0.3, 0.2)) for seed, name in enumerate("ab")]
    rounds.take_samples(pair, CPU, Settings(20, 60.0, decide=True))
    assert 50 < clock.now <= 60


def test_a_budget_without_end_and_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pair = [clock.contender(name, noisy(clock, seed, 0.3, 0.2)) for seed, name in enumerate("ab")]
    samples = rounds.take_samples(pair, CPU, Settings(2500, math.inf))
    assert len(samples["a"]) == len(samples["b"]) == 2500


def test_slow_calls_are_not_warmed_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 2.5 s had 3 rounds in 191 s, which prove nothing: 60 s are enough for a verdict."""
    clock = Clock(monkeypatch)
    pair = [
        clock.contender("eager", noisy(clock, 0, 2.5, 0.05)),
        clock.contender("patched", noisy(clock, 1, 1.5, 0.05)),
    ]
    first = {"eager": 40.0, "patched": 3.0}  # something was compiled then
    samples = rounds.take_samples(pair, CPU, Settings(20, 60.0, decide=True), first=first)
    found = ratio(*([s.seconds for s in samples[name]] for name in ("eager", "patched")))
    assert found.verdict == "faster" and found.rounds >= 6 and clock.now <= 60


@pytest.mark.parametrize(
    ("low", "high", "count", "decided"),
    [
        (1.19, 1.30, 9, True),
        (0.78, 0.82, 9, True),
        (1.001, 1.05, 9, False),  # only just excludes 1: one look of several
        (0.97, 1.03, 9, False),
        (1.1, 1.35, 9, False),  # too wide to be of use
        (2.2, 2.8, 9, True),  # as wide, but beside so large a gain
        (1.19, 1.30, 5, False),
    ],
)
def test_what_decides(low: float, high: float, count: int, decided: bool) -> None:
    assert Ratio((low * high) ** 0.5, low, high, count).suffices(decide=True) is decided


def test_times_and_ratios_are_of_one_kind() -> None:
    """257 ms and 80 ms stood beside 2.36x: a busy machine, and two ways to take the middle."""
    random = np.random.default_rng(3)
    load = random.choice([1.0, 2.6], 31)
    seconds = {
        "eager": list(0.1 * load * random.lognormal(0, 0.02, 31)),
        "patched": list(0.05 * load * random.lognormal(0, 0.6, 31)),
    }
    times = paired_times(seconds, "eager")
    plain = ratio(seconds["eager"], seconds["patched"])
    assert times["eager"] == pytest.approx(float(np.median(seconds["eager"])))
    assert times["eager"] / times["patched"] == pytest.approx(plain.value, rel=1e-5)
    shown = ratio(seconds["eager"], seconds["patched"], shown=(0.257, 0.080))
    assert shown.value == pytest.approx(0.257 / 0.080, rel=1e-5)
    assert shown.low <= plain.low and shown.high >= max(plain.high, shown.value)
