"""A plugin of pytest: of each test's cases every second one, from the one that HALF (0, 1) names.

Two sets of instructions take one half each, of the same code but for the width of a vector; the
machine's best set takes all. WHOLE_MATRICES=1 leaves all to every set.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from sampling import WHOLE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = [item.nodeid.partition("[")[0] for item in items]
    cases, seen, half = Counter(names), Counter[str](), int(os.environ["HALF"])
    kept = []
    for name, item in zip(names, items, strict=True):
        if WHOLE or cases[name] == 1 or seen[name] % 2 == half:
            kept.append(item)
        seen[name] += 1
    items[:] = kept
