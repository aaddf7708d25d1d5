"""What a profile says: one verdict in plain words, numbers as people write them."""

from typing import Any

import pytest

from elsa_core.measuring.intervals import Ratio
from elsa_core.profiling import words


def gain(value: float, low: float, high: float, rounds: int = 9) -> dict[str, Any]:
    return Ratio(value, low, high, rounds).to_dict()


@pytest.mark.parametrize(
    ("ratio", "usual", "other"),
    [
        (gain(1.24, 1.19, 1.3), "1.24x faster, 1.19 to 1.30",
         "patched+graph is 1.24x faster than compile, 1.19 to 1.30"),
        (gain(0.8, 0.75, 0.82), "1.25x slower, 1.22 to 1.33",
         "patched+graph is 1.25x slower than compile, 1.22 to 1.33"),
        (gain(1.0, 0.98, 1.03), "no difference found: within 3%",
         "no difference found between patched+graph and compile: within 3%"),
        (gain(1.0, 0.999, 1.004), "no difference found: within 0.4%", ""),
        (gain(1.5, 1.4, 1.6, rounds=3), "undecided: 3 rounds fitted into the budget, 6 are needed; "
         "a longer budget gives them", ""),
    ],
)  # fmt: skip
def test_the_verdict_in_one_line(ratio: dict[str, Any], usual: str, other: str) -> None:
    found = {"gain": ratio, "best_patched": "patched", "best_baseline": "eager"}
    assert words.verdict_text(found) == usual
    named = found | {"best_patched": "patched+graph", "best_baseline": "compile"}
    assert not other or words.verdict_text(named) == other


def test_an_undecided_ratio_says_why() -> None:
    assert words.ratio_text(gain(1.2, 1.1, 1.3, rounds=4)) == "1.20x in 4 rounds, too few to decide"
    assert words.ratio_text(gain(1.2, 1.1, 1.3, rounds=4), short=True) == "4 rounds"
    assert words.ratio_text(gain(1.0, 0.97, 1.02)) == "no difference, within 3%"
    assert words.ratio_text(gain(1.0, 0.97, 1.02), short=True) == "same ±3%"
    assert words.ratio_text(gain(1.2, 1.1, 1.3)) == "1.20x (1.10 to 1.30)"
    assert words.ratio_text(None) == ""


def group(*ratios: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"ratio": each, "seconds_before": 0.003, "seconds_after": 0.002} for each in ratios]


def test_a_group_of_sites_has_a_number_only_where_all_are_decided() -> None:
    faster, slower = gain(1.2, 1.1, 1.3), gain(0.8, 0.7, 0.9)
    equal, wide, few = gain(1.0, 0.97, 1.02), gain(1.0, 0.9, 1.25), gain(0.5, 0.2, 1.1, rounds=4)
    assert words.group_short(group(faster, slower)) == "1.50"
    assert words.group_short(group(faster, few)) == "4 rounds"
    assert words.group_short(group(equal, wide)) == "same ±25%"
    assert words.group_short(group(faster, equal)) == "undecided"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.536, "2.54 s"), (254.0, "254 s"), (0.2571, "257 ms"), (0.00821, "8.21 ms"),
     (0.00041, "0.410 ms"), (4.1e-5, "41.0 us"), (0.9999, "1,000 ms"), (1234.5, "1,234 s"),
     (1.603, "1.60 s"), (1.0, "1.00 s"), (99.96, "100 s"), (9.996, "10.0 s"), (0.0, "0 us")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text
