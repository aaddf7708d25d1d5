"""The file of a kernel pack: written whole or not at all, read only where it can be trusted."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import at_once

from elsa_core.backends.triton.pack import store
from elsa_core.errors import UnavailableError

HEADER = {"arch": 90, "triton": "3.9.0", "elsa": "0", "sources": "0" * 64}


def kernels(*names: str) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Metadata and code, by key."""
    return {
        f"{number:064x}": ({"name": name, "shared": 1024}, name.encode() * (number + 3))
        for number, name in enumerate(names)
    }


def written(folder: Path, *names: str) -> Path:
    store.write(folder, HEADER, kernels(*names))
    return folder / store.NAME


def code_of(folder: Path) -> dict[str, bytes]:
    pack = store.read(folder)
    return {entry.metadata["name"]: pack.cubin(entry) for entry in pack.entries.values()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "packs"
    place.mkdir()
    return place / "sm_90"


def resealed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change an index and give it a digest of its own: what an author of it could do."""
    whole = path.read_bytes()
    end = 80 + int(whole[64:80])
    header = json.loads(whole[80:end])
    change(header)
    index = json.dumps(header).encode()
    head = f"{hashlib.sha256(index).hexdigest()}{len(index):016}".encode()
    path.write_bytes(head + index + whole[end:])


def row(header: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(header["kernels"].values()))
    return found


def test_what_was_written_is_read(folder: Path, tmp_path: Path) -> None:
    path = written(folder, "one", "two")
    pack = store.read(folder)
    assert (pack.arch, pack.triton, pack.sources, pack.bytes) == (90, "3.9.0", "0" * 64, 21)
    assert {
        key: (entry.metadata, pack.cubin(entry)) for key, entry in pack.entries.items()
    } == kernels("one", "two")
    again = written(tmp_path / "again" / "sm_90", "one", "two")
    assert again.read_bytes() == path.read_bytes()
    store.write(folder, HEADER, {key: ({}, b"same") for key in kernels("one", "two")})
    assert store.read(folder).bytes == 4  # equal code is there once


def test_no_flipped_byte_passes(folder: Path) -> None:
    path = written(folder, "one", "two")
    whole, pack = path.read_bytes(), store.read(folder)
    start = len(whole) - pack.bytes
    for position in (*range(0, start, 3), *range(start, len(whole))):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(UnavailableError, match="build it again"):
            code_of(folder)
    for length in (0, 1, 80, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UnavailableError, match="no kernel pack"):
            store.read(folder)
    path.write_bytes(whole + b"\0")
    with pytest.raises(UnavailableError, match="does not hold"):
        store.read(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(schema=1), lambda h: h.update(arch="90"), lambda h: h.pop("sources"),
        lambda h: h.update(bytes=1 << 40), lambda h: h["kernels"].update(short={}),
        lambda h: h["kernels"].update(short=row(h)), lambda h: h.update(kernels=[]),
        lambda h: row(h).update(metadata=[]), lambda h: row(h).update(metadata={"a b": 1}),
        lambda h: row(h).update(offset=-1), lambda h: row(h).update(offset=1),
        lambda h: row(h).update(size=0), lambda h: row(h).update(size="1"),
        lambda h: row(h).update(size=store.LARGEST_CODE + 1),
        lambda h: row(h).update(sha256="x"), lambda h: row(h).pop("metadata"),
    ],
)  # fmt: skip
def test_an_index_beyond_the_format_is_refused(
    change: Callable[[dict[str, Any]], Any], folder: Path
) -> None:
    """Even with a right digest, in one line."""
    resealed(written(folder, "one"), change)
    with pytest.raises(UnavailableError, match="no kernel pack") as caught:
        store.read(folder)
    assert "\n" not in str(caught.value)


def test_too_large_an_index_is_not_read(folder: Path) -> None:
    path = written(folder, "one")
    path.write_bytes(b"0" * 64 + f"{store.LARGEST_INDEX + 1:016}".encode())
    with pytest.raises(UnavailableError, match="begin as a pack"):
        store.read(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        store.read(folder)


@pytest.mark.parametrize("name", [store.NAME, ".", ".."])
@pytest.mark.parametrize("foreign", ["owner", "mode"])
def test_what_others_may_write_is_not_read(
    name: str, foreign: str, folder: Path, give_away: Callable[[Path], None]
) -> None:
    written(folder, "one")
    path = folder.parent if name == ".." else folder if name == "." else folder / name
    store.read(folder)
    if foreign == "owner":
        give_away(path)
    else:
        path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(UnavailableError, match="is not used"):
        store.read(folder)


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    path = written(folder, "one")
    path.replace(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError, match="no plain file"):
        store.read(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnavailableError, match="no plain file"):
        store.read(folder)


def test_a_new_pack_replaces_the_old_one_under_a_reader(folder: Path) -> None:
    before = os.umask(0o002)  # of systems on which each user has a group
    try:
        path = written(folder, "one")
    finally:
        os.umask(before)
    assert not path.stat().st_mode & 0o022
    old = store.read(folder)
    written(folder, "two", "three")
    (entry,) = old.entries.values()
    assert old.cubin(entry) == b"one" * 3  # its file is open
    assert code_of(folder).keys() == {"two", "three"}
    assert [found.name for found in folder.iterdir()] == [store.NAME]


def test_an_interrupted_writer_leaves_the_old_pack(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, "one")

    def stopped(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        written(folder, "two", "three")
    monkeypatch.undo()
    assert code_of(folder) == {"one": b"one" * 3}
    assert [found.name for found in folder.iterdir()] == [store.NAME]


def test_writers_and_readers_side_by_side(folder: Path) -> None:
    """Every reader finds a whole pack, of one writer or of another."""
    written(folder, "one")

    def work(names: tuple[str, ...]) -> None:
        for _ in range(15):
            if names:
                written(folder, *names)
            assert code_of(folder).keys() in ({"one"}, {"two", "three"}, {"four"})

    at_once(work, (("two", "three"), ("four",), ()))
