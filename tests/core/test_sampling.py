"""The parts of large matrices that runs of the suite take."""

from __future__ import annotations

import itertools

import pytest
import sampling

AXES = ("abcd", (1, 2, 3), (False, True, None))


@pytest.mark.parametrize("one_in", [2, 3])
def test_parts_of_a_matrix(one_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they are the whole; every pair of values is in each."""
    monkeypatch.setattr(sampling, "WHOLE", False)
    parts = []
    for part in range(one_in):
        monkeypatch.setattr(sampling, "SAMPLE", part)
        parts.append(sampling.thinned(*AXES, one_in=one_in))
        for i, j in itertools.combinations(range(3), 2):
            pairs = {(row[i], row[j]) for row in parts[-1]}
            assert pairs == set(itertools.product(AXES[i], AXES[j]))
    whole = list(itertools.product(*AXES))
    assert sorted(itertools.chain(*parts), key=whole.index) == whole
    monkeypatch.setattr(sampling, "WHOLE", True)
    assert sampling.thinned(*AXES, one_in=one_in) == whole


@pytest.mark.parametrize("one_in", [2, 3])
def test_parts_of_a_list(one_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WHOLE", False)
    parts = []
    for part in range(one_in):
        monkeypatch.setattr(sampling, "SAMPLE", part)
        parts.append(sampling.some("abcdefg", one_in))
        assert len(parts[-1]) >= 7 // one_in
    assert sorted(itertools.chain(*parts)) == list("abcdefg")
    monkeypatch.setattr(sampling, "WHOLE", True)
    assert sampling.some("abcdefg", one_in) == list("abcdefg")
