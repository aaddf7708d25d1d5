"""A plugin of pytest: of each test's cases every second one, by the indices of its parameters.

Two sets of instructions take one half each, which HALF (0, 1) and the run's SAMPLE name; the
machine's best set takes all. The halves are not the same code: loads and stores of half precision
are written for each set. Every value of a parameter is in both halves where another parameter has
two values or more. Tests of few cases keep them all, and WHOLE_MATRICES=1 leaves all to every set.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from sampling import taken

FEW = 8


def axes(item: pytest.Item) -> list[tuple[object, ...]]:
    """What a case was given: of each `parametrize`, and of each parameter of a fixture."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return []
    left = dict(item.callspec.params)
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.append(tuple(left.pop(name.strip()) for name in names))
    return found + [(value,) for value in left.values()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = [item.nodeid.partition("[")[0] for item in items]
    cases, half = Counter(tests), int(os.environ["HALF"])
    # Of each axis of each test, what it gives in order; pytest's own indices count the cases.
    orders: defaultdict[tuple[str, int], dict[tuple[int, ...], int]] = defaultdict(dict)
    kept = []
    for test, item in zip(tests, items, strict=True):
        place = half
        for number, given in enumerate(axes(item)):
            order = orders[test, number]
            place += order.setdefault(tuple(map(id, given)), len(order))
        if cases[test] <= FEW or taken(place):
            kept.append(item)
    items[:] = kept
