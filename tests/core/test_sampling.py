"""The parts of large matrices that runs of the suite take."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sampling

AXES = ("abcd", (1, 2, 3), (False, True, None))
PLUGIN = Path(__file__).parents[1] / "backends"
CASES = """
import pytest

@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize(("two", "names"), [(3, 3), (4, 4), (5, 5)])
@pytest.mark.parametrize("outer", "ab")
def test_many(outer, two, names, inner):
    pass

@pytest.mark.parametrize("few", range(8))
def test_few(few):
    pass

def test_one():
    pass
"""


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


def halves(tmp_path: Path, **variables: str) -> list[list[str]]:
    """What each half of the plugin's collects of CASES."""
    tmp_path.joinpath("test_cases.py").write_text(CASES)
    options = ("-q", "-p", "every_second", "-p", "no:cacheprovider", "--collect-only")
    own = {"PYTHONPATH": str(PLUGIN), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, "-c", os.devnull, "test_cases.py"],
            cwd=tmp_path, stdout=subprocess.PIPE, text=True,
            env=os.environ | own | {"HALF": half} | variables,
        )
        for half in "01"
    ]  # fmt: skip
    found = []
    for process in running:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out
        found.append([line.partition("::")[2] for line in out.splitlines() if "::" in line])
    return found


def test_halves_of_instruction_sets(tmp_path: Path) -> None:
    """Every pair of values is in both halves of a large test; of a small one each has all."""
    one, two = halves(tmp_path, SAMPLE="0", WHOLE_MATRICES="0")
    small = [f"test_few[{i}]" for i in range(8)] + ["test_one"]
    assert one[-9:] == two[-9:] == small
    many = [name.partition("[")[2].rstrip("]").split("-") for name in one[:-9]]
    other = [name.partition("[")[2].rstrip("]").split("-") for name in two[:-9]]
    assert len(many) == len(other) == 6 and not [row for row in many if row in other]
    for rows in (many, other):
        for i, j in ((0, 1), (0, 3), (1, 3)):
            values = [sorted({row[k] for row in many + other}) for k in (i, j)]
            assert {(row[i], row[j]) for row in rows} == set(itertools.product(*values))
    assert halves(tmp_path, SAMPLE="1", WHOLE_MATRICES="0") == [two, one]
    whole = halves(tmp_path, SAMPLE="0", WHOLE_MATRICES="1")
    assert whole[0] == whole[1] and len(whole[0]) == 21
