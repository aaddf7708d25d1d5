"""Files and directories appear whole or not at all, with the rights that the user's others have."""

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elsa_core.base import files
from elsa_core.errors import ArgumentError, ModelError


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    for there in ("~/x", "~/file", "~/file/inside"):
        assert files.located(there) == tmp_path / there[2:]
    (tmp_path / "loop").symlink_to("loop")
    for bad in ("~nosuchuser/x", "a" * 300, "nul\0", "~/loop"):
        with pytest.raises(ModelError, match=r"^\S+ cannot be used as a path: .+$"):
            files.located(bad, ModelError)
        with pytest.raises(ArgumentError):
            files.located(bad)


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127])
def test_the_longest_names_can_be_written(tmp_path: Path, name: str) -> None:
    with files.staged(tmp_path / name) as staging:
        (staging / "a").touch()
    with files.staged(tmp_path / name) as staging:
        (staging / "b").touch()
    assert [path.name for path in (tmp_path / name).iterdir()] == ["b"]
    files.write_text("x", tmp_path / name[1:])


def test_threads_write_below_the_same_new_folders(tmp_path: Path) -> None:
    """One found a folder that another had just made, and failed."""
    together, before = threading.Barrier(4), sys.getswitchinterval()

    def write(target: Path) -> None:
        together.wait()
        with files.staged(target) as staging:
            (staging / "a").touch()

    targets = [tmp_path / f"{i}" / "b" / f"{j}" for i in range(50) for j in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            written = [pool.submit(write, target) for target in targets]
    finally:
        sys.setswitchinterval(before)
    assert [each.exception() for each in written] == [None] * len(targets)
    assert {mode(target) for target in targets} == {0o750}
    with files.staged(tmp_path / "last") as staging:
        assert files.umask() == 0o027, staging


def test_a_text_replaces_another_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    for text in ("old", "newer"):
        assert files.write_text(text, target) == target and target.read_text() == text
    assert list(tmp_path.iterdir()) == [target] and mode(target) == 0o640


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "plot.png"
    target.write_text("old")
    with pytest.raises((KeyboardInterrupt, OSError)), files.staged_file(target) as staging:
        staging.write_text("half")
        raise error
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_directory_brings_its_parents_or_takes_them_back(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "bundle"
    with pytest.raises(KeyboardInterrupt), files.staged(target):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with files.staged(target) as staging:
        files.write_json(staging / "plan.json", {"a": 1})
    assert (target / "plan.json").read_text() == '{\n  "a": 1\n}\n'
    assert mode(target) == 0o750
