"""Files and directories appear whole or not at all, with the rights that the user's others have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elsa_core import files


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_text_replaces_another_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    for text in ("old", "newer"):
        assert files.write_text(text, target) == target
        assert target.read_text() == text
    assert list(tmp_path.iterdir()) == [target]
    assert mode(target) == 0o640


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "plot.png"
    target.write_text("old")
    with pytest.raises((KeyboardInterrupt, OSError)), files.staged_file(target) as staging:
        staging.write_text("half")
        raise error
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_brings_its_parents_or_takes_them_back(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "bundle"
    with pytest.raises(KeyboardInterrupt), files.staged(target):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with files.staged(target) as staging:
        files.write_json(staging / "plan.json", {"a": 1})
    assert (target / "plan.json").read_text() == '{\n  "a": 1\n}\n'
    assert mode(target) == 0o750
