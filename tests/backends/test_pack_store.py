"""The files of a kernel pack: written whole or not at all, read only where they can be trusted."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elsa_core.backends.triton.pack import record, store
from elsa_core.backends.triton.pack.record import Code, Kernel
from elsa_core.backends.triton.pack.store import Entry, Pack
from elsa_core.errors import UnavailableError

HEADER = {
    "arch": 90, "triton": "3.9.0", "elsa": "0", "sources": "0" * 64,
    "source_keys": {"module:kernel": "1" * 64},
}  # fmt: skip
KERNEL = Kernel(
    symbol="kernel", cubin=Code(0, 0, ""), ptx=None, shared=1024, warps=4, cluster=(1, 1, 1),
    scratch=(0, 1), profile_scratch=(0, 1), overlaps=True, cooperative=False,
    arguments=(("Q", "*fp32"), ("n", "i32"), ("scale", "fp32")),
)  # fmt: skip


def kernels(*names: str) -> tuple[dict[str, Entry], dict[str, bytes]]:
    """Entries and their code, by key."""
    entries, code = {}, {}
    for number, name in enumerate(names):
        key = f"{number:064x}"
        kernel = dataclasses.replace(KERNEL, symbol=name)
        entries[key] = Entry(kernel, {"name": name}, {"shared": 1024})
        code[key] = name.encode() * (number + 3)
    return entries, code


def written(folder: Path, *names: str, ptx: bool = False) -> Path:
    entries, code = kernels(*names)
    texts = {key: b"// " + content for key, content in code.items()} if ptx else None
    store.write(folder, HEADER, entries, code, texts)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "packs"
    place.mkdir()
    return place / "sm_90"


def resealed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change an index and give it a digest of its own: what an author of it could do."""
    path = folder / store.INDEX
    header = json.loads(path.read_text())
    del header["sha256"]
    change(header)
    path.write_bytes(store._sealed(header))


def row(header: dict[str, Any]) -> dict[str, Any]:
    kernel: dict[str, Any] = next(iter(header["kernels"].values()))["kernel"]
    return kernel


def test_what_was_written_is_read(folder: Path) -> None:
    pack = store.read(written(folder, "one", "two", ptx=True))
    entries, code = kernels("one", "two")
    assert (pack.arch, pack.triton, pack.source_keys) == (90, "3.9.0", HEADER["source_keys"])
    assert pack.entries.keys() == entries.keys()
    for key, entry in pack.entries.items():
        assert pack.cubin(entry.kernel) == code[key]
        assert pack.ptx_of(entry.kernel) == b"// " + code[key]
        expected = dataclasses.replace(entries[key].kernel, cubin=entry.kernel.cubin,
                                       ptx=entry.kernel.ptx)  # fmt: skip
        assert entry == Entry(expected, entries[key].facts, entries[key].metadata)
    pack.verify()


def test_equal_kernels_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    first, second = written(folder, "one", "two", ptx=True), tmp_path / "again" / "sm_90"
    second.parent.mkdir()
    written(second, "one", "two", ptx=True)
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


def test_equal_code_is_there_once(folder: Path) -> None:
    entries, _ = kernels("one", "two")
    store.write(folder, HEADER, entries, dict.fromkeys(entries, b"same"), None)
    pack = store.read(folder)
    assert pack.bytes == 4
    assert all(pack.cubin(entry.kernel) == b"same" for entry in pack.entries.values())


def test_no_flipped_byte_of_the_index_passes(folder: Path) -> None:
    path = written(folder, "one") / store.INDEX
    whole = path.read_bytes()
    for position in (*range(0, len(whole) - 90, 5), *range(len(whole) - 90, len(whole))):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(UnavailableError, match="build it again"):
            store.read(folder)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UnavailableError, match="no index"):
            store.read(folder)


def test_no_flipped_byte_of_the_code_passes(folder: Path) -> None:
    written(folder, "one", "two", ptx=True)
    for path in folder.glob("*.bin"):
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(
                whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
            )
            pack = store.read(folder)
            with pytest.raises(UnavailableError, match="damaged"):
                pack.verify()
            read = pack.cubin if path.name.startswith("cubins") else pack.ptx_of
            refused = 0
            for entry in pack.entries.values():
                try:
                    read(entry.kernel)
                except UnavailableError:
                    refused += 1
            assert refused == 1
        path.write_bytes(whole)
    store.read(folder).verify()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_data_file_of_another_length(change: int, folder: Path) -> None:
    (path,) = written(folder, "one").glob("cubins-*")
    whole = path.read_bytes()
    path.write_bytes(whole[:change] if change < 0 else whole + b"\0")
    with pytest.raises(UnavailableError, match="does not have its"):
        store.read(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(schema=2),
        lambda h: h.update(arch="90"),
        lambda h: h.pop("sources"),
        lambda h: h["cubins"].update(name="../cubins-0000000000000000.bin"),
        lambda h: h["cubins"].update(name="/etc/passwd"),
        lambda h: h["cubins"].update(bytes=1 << 40),
        lambda h: h["cubins"].update(bytes=-1),
        lambda h: h["kernels"].update(short={}),
        lambda h: h.update(kernels=[]),
        lambda h: h.update(source_keys=[]),
        lambda h: h.update(source_keys={"kernel": 1}),
        lambda h: next(iter(h["kernels"].values())).update(metadata=[]),
        lambda h: next(iter(h["kernels"].values())).update(metadata={"a b": 1}),
        lambda h: row(h)["cubin"].update(offset=-1),
        lambda h: row(h)["cubin"].update(offset=1),
        lambda h: row(h)["cubin"].update(size=0),
        lambda h: row(h)["cubin"].update(size=True),
        lambda h: row(h)["cubin"].update(size=record.LARGEST_CODE + 1),
        lambda h: row(h)["cubin"].update(sha256="x"),
        lambda h: row(h).update(symbol="a b"),
        lambda h: row(h).update(symbol=""),
        lambda h: row(h).update(shared=-1),
        lambda h: row(h).update(shared=record.LARGEST_SHARED + 1),
        lambda h: row(h).update(warps=0),
        lambda h: row(h).update(warps=64),
        lambda h: row(h).update(cluster=[1, 1]),
        lambda h: row(h).update(scratch=[0, "1"]),
        lambda h: row(h).update(overlaps=1),
        lambda h: row(h).update(arguments=[["Q", "fp32; drop"]]),
        lambda h: row(h).update(arguments=[["Q", "i32"]] * 257),
        lambda h: row(h).pop("profile_scratch"),
    ],
)  # fmt: skip
def test_an_index_beyond_the_format_is_refused(
    change: Callable[[dict[str, Any]], None], folder: Path
) -> None:
    """Even with a right digest: one line, and nothing outside of the folder is opened."""
    resealed(written(folder, "one"), change)
    with pytest.raises(UnavailableError, match="no index of a kernel pack") as caught:
        store.read(folder)
    assert "\n" not in str(caught.value)


def test_too_large_an_index_is_not_read(folder: Path) -> None:
    path = written(folder, "one") / store.INDEX
    with path.open("ab") as file:
        file.truncate(store.LARGEST_INDEX + 1)
    with pytest.raises(UnavailableError, match="above"):
        store.read(folder)


def test_a_bomb_of_ptx_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = store.read(written(folder, "one", ptx=True))
    monkeypatch.setattr(store, "LARGEST_CODE", 4)
    (entry,) = pack.entries.values()
    with pytest.raises(UnavailableError, match="damaged"):
        pack.ptx_of(entry.kernel)


def test_there_is_none(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.read(folder)


@pytest.mark.parametrize("name", ["index.json", "cubins-*", ".", ".."])
@pytest.mark.parametrize("foreign", ["owner", "mode"])
def test_what_others_may_write_is_not_read(
    name: str, foreign: str, folder: Path, give_away: Callable[[Path], None]
) -> None:
    written(folder, "one")
    path = folder.parent if name == ".." else folder if name == "." else next(folder.glob(name))
    store.read(folder)
    if foreign == "owner":
        give_away(path)
    else:
        path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(UnavailableError, match="is not used"):
        store.read(folder)
    store.read(folder, trusted=True)


@pytest.mark.parametrize("name", ["index.json", "cubins-*"])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_link_is_not_followed(name: str, trusted: bool, folder: Path, tmp_path: Path) -> None:
    path = next(written(folder, "one").glob(name))
    path.replace(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError, match="no plain file"):
        store.read(folder, trusted=trusted)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnavailableError, match="no plain file"):
        store.read(folder, trusted=trusted)


def test_a_new_pack_replaces_the_old_one_under_a_reader(folder: Path) -> None:
    old = store.read(written(folder, "one"))
    written(folder, "two", "three")
    (entry,) = old.entries.values()
    assert old.cubin(entry.kernel) == b"one" * 3  # its files are open
    assert len(store.read(folder).entries) == 2
    assert len(list(folder.glob("cubins-*"))) == 1


@pytest.mark.parametrize("at", ["cubins", "index"])
def test_an_interrupted_writer_leaves_the_old_pack(
    at: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, "one")
    replace = Path.replace

    def stopped(self: Path, target: Path) -> Path:
        if Path(target).name.startswith(at):
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        written(folder, "two", "three")
    monkeypatch.undo()
    pack = store.read(folder)
    (entry,) = pack.entries.values()
    assert pack.cubin(entry.kernel) == b"one" * 3
    assert not list(folder.glob(".pack-*"))
    written(folder, "four")
    assert len(list(folder.glob("cubins-*"))) == 1  # the interrupted one's data went too


def test_writers_and_readers_side_by_side(folder: Path) -> None:
    """Every reader finds a whole pack, of one writer or of another."""
    written(folder, "one")
    failures: list[BaseException] = []
    ended = threading.Event()

    def write(*names: str) -> None:
        for _ in range(15):
            written(folder, *names)

    def read() -> None:
        while not ended.is_set():
            pack: Pack = store.read(folder)
            pack.verify()
            names = {entry.kernel.symbol for entry in pack.entries.values()}
            assert names in ({"one"}, {"two", "three"}, {"four"})

    def guarded(work: Callable[..., None], *given: str) -> None:
        try:
            work(*given)
        except BaseException as error:
            failures.append(error)

    writers = [
        threading.Thread(target=guarded, args=(write, *names))
        for names in (("two", "three"), ("four",))
    ]
    reader = threading.Thread(target=guarded, args=(read,))
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    reader.join()
    assert not failures
    assert len(list(folder.glob("*.bin"))) == 1 and not list(folder.glob(".pack-*"))
