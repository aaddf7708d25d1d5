"""The cache of built libraries: whose they are, whether whole, and what a killed build left."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest
from processes import gone, python, seen_from_proc, signalled, stand_in, started

from elsa_core.backends import cache, compiler, native
from elsa_core.errors import UnavailableError
from elsa_core.exporting import ort_library

Give = Callable[[Path], None]


@pytest.fixture(scope="module")
def built() -> Path:
    """A library of the right kind, wherever this machine keeps it."""
    return native.build()


@pytest.fixture
def place(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a compiler whose every output is a copy of `built`."""
    action = f'echo run >> "{tmp_path}/runs"\ncp "{built}" "$output"'
    monkeypatch.setenv("CXX", stand_in(tmp_path, action))
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(cache.tempfile, "tempdir", None)
    cache._warn_once.cache_clear()
    return tmp_path / "cache" / "native"


def builds(tmp_path: Path) -> int:
    """How often the compiler has run."""
    path = tmp_path / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def with_zeros(content: bytes) -> bytes:
    """Half a page of them: it passes for whole by its headers; loading it was a SIGSEGV."""
    start = len(content) // 3
    return content[:start] + bytes(2048) + content[start + 2048 :]


@pytest.mark.parametrize(
    "damaged", [with_zeros, lambda whole: whole[:63], lambda whole: whole[:-1]]
)
def test_a_damaged_library_is_built_again(
    damaged: Callable[[bytes], bytes], place: Path, built: Path, tmp_path: Path
) -> None:
    path = native.build()
    runs = builds(tmp_path)
    assert native.build() == path and builds(tmp_path) == runs
    path.write_bytes(damaged(path.read_bytes()))
    assert (native.status()["built"], native.status()["damaged"]) == (False, True)
    assert native.build() == path
    assert path.read_bytes() == built.read_bytes() and builds(tmp_path) == 2 * runs
    assert native.status()["built"]


def test_doctor_and_build_survive_a_damaged_library(place: Path, tmp_path: Path) -> None:
    """A process of its own each: the crash took the command with it."""
    path = native.build()
    content = bytearray(path.read_bytes())
    content[8192 : len(content) - 8192] = bytes(len(content) - 16384)
    path.write_bytes(content)
    for command, word in (("doctor", "is damaged"), ("build", '"compiled": true')):
        done = python("-m", "elsa_cli", command, "--json")
        assert done.returncode == 0, (command, done.returncode, done.stderr)
        assert word in done.stdout


def test_a_library_of_another_user_is_built_again(
    place: Path, tmp_path: Path, give_away: Give
) -> None:
    path = native.build()
    runs = builds(tmp_path)
    give_away(path)
    assert cache.read(path) is None
    assert native.build() == path and builds(tmp_path) == 2 * runs
    assert cache.read(path) is not None


@pytest.mark.parametrize("change", ["mode", "link", "digest", "no digest", "fifo"])
def test_a_library_that_anybody_could_have_written_is_not_loaded(place: Path, change: str) -> None:
    path = native.build()
    digest = path.with_name(f"{path.name}.sha256")
    if change == "mode":
        path.chmod(0o777)
    elif change == "link":
        path.symlink_to(path.rename(path.with_name("elsewhere.so")))
    elif change == "digest":
        digest.write_text("0" * 64 + "\n")
    elif change == "no digest":
        digest.unlink()
    else:
        path.unlink()
        os.mkfifo(path)
    assert cache.read(path) is None
    assert native.build() == path
    assert cache.read(path) is not None


@pytest.mark.parametrize("which", ["native", "cache"])
def test_a_cache_of_another_user_is_not_used(
    place: Path, tmp_path: Path, give_away: Give, caplog: pytest.LogCaptureFixture, which: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    planted = native.build()
    give_away(planted.parent if which == "native" else planted.parent.parent)
    with caplog.at_level(logging.WARNING, "elsa"):
        path = native.build()
        native.build()
    assert path == tmp_path / "own" / "elsa" / "native" / planted.name
    assert len(caplog.messages) == 1
    assert "belongs to another user" in caplog.messages[0] and "is used instead" in caplog.text


def test_a_cache_that_others_may_write_to_is_not_used(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the user's own is open as well, a private one in the folder of temporary files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    for folder in (place, tmp_path / "own" / "elsa" / "native"):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    private = tmp_path / "scratch" / f"elsa-{os.geteuid()}"
    assert native.build().parent == private / "native"
    assert "chmod go-w" in caplog.text
    assert private.stat().st_mode & 0o022 == 0
    private.chmod(0o777)
    with pytest.raises(UnavailableError, match="set ELSA_CACHE_DIR to a directory of yours"):
        native.build()


@pytest.mark.parametrize("above", ["mode", "link"])
def test_a_cache_below_a_folder_that_others_may_write_to_is_not_used(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: str
) -> None:
    """They would put another folder in its place after it had been looked at."""
    far = tmp_path / "open" / "a" / "b"
    far.mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    if above == "link":
        (tmp_path / "link").symlink_to(far)
        far = tmp_path / "link"
    monkeypatch.setenv("ELSA_CACHE_DIR", str(far / "cache"))
    assert cache.directory() == tmp_path / "own" / "elsa" / "native"
    (tmp_path / "open").chmod(0o755)
    assert cache.directory() == Path(os.path.realpath(far)) / "cache" / "native"


def test_a_sticky_folder_holds_a_cache_of_ones_own(place: Path) -> None:
    place.mkdir(parents=True)
    place.parent.chmod(0o1777)
    assert cache.directory() == place


@pytest.mark.parametrize("library", [native, ort_library], ids=["torch", "onnxruntime"])
def test_a_umask_of_zero_leaves_nothing_open(place: Path, library: object) -> None:
    before = os.umask(0)
    try:
        path = library.build()  # type: ignore[attr-defined]
    finally:
        os.umask(before)
    for each in (place.parent, place, *place.iterdir()):
        assert each.stat().st_mode & 0o022 == 0, each
    assert cache.read(path) is not None


# --- compilers that hang, builds that were killed ------------------------------------------------


@pytest.fixture
def hangs(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A compiler that starts another process, which never ends; the word that finds it."""
    word = f"98765.{os.getpid()}"
    script = tmp_path / "hangs"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && [ -z "$HANG" ] && echo hangs 1.0 && exit\n'
        f'trap "touch \'{tmp_path}/asked\'; exit 1" TERM\necho half > "$TMPDIR/cc.s"\n'
        f"touch '{tmp_path}/started'\nsleep {word}\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    yield word
    assert gone(word)


@seen_from_proc
def test_a_compiler_that_hangs_is_stopped(
    hangs: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "BUILD_SECONDS", 1)
    with pytest.raises(UnavailableError, match="did not end within 1 s on unit"):
        native.build()
    assert [path for path in place.iterdir() if path.suffix != ".lock"] == []


@seen_from_proc
def test_a_compiler_that_never_says_its_version(
    hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANG", "1")
    monkeypatch.setattr(compiler, "VERSION_SECONDS", 0.5)
    with pytest.raises(UnavailableError, match=r"gave no version in 0\.5 s"):
        native.build()


@seen_from_proc
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_ends_the_compilers_too(
    hangs: str, place: Path, tmp_path: Path, number: int
) -> None:
    """`cc1plus` went on for minutes after `elsa build` had ended, and left its files in TMPDIR."""
    child = started("-m", "elsa_cli", "build")
    assert signalled(child, (tmp_path / "started").exists, number) == (128 + number, "", "")
    assert (tmp_path / "asked").exists(), "killed before it was asked to end"
    assert list((tmp_path / "scratch").iterdir()) == []
    assert [path for path in place.iterdir() if path.suffix != ".lock"] == []


def test_waiting_for_another_process_is_said(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiler.library_path(native.recipe())
    cache.make(place)
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    said: list[str] = []
    with (
        filelock.FileLock(f"{path}.lock"),
        pytest.raises(UnavailableError, match=r"another process has held .*\.lock"),
    ):
        native.build(progress=said.append)
    assert caplog.messages == said and len(said) == 1
    assert said[0].startswith("waiting for another process that builds the native library")
