"""The files of a pack: an index and one data file of cubins, read only where they can be trusted.

    <folder>/sm_90/index.json              what is in it; its last member is the digest of the rest
    <folder>/sm_90/cubins-<digest>.bin     the code, one kernel behind the other
    <folder>/sm_90/ptx-<digest>.bin        the same as PTX, in the pack of one architecture

A pack is code that the GPU runs with the user's rights. Outside of this package it is read only
where its folder and files belong to this user or root and no other user can write to them, as
`elsa_core.backends.cache` has it. Every byte is under a digest: the index under its own, each
kernel's code under one that the index holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsa_core.backends import cache
from elsa_core.backends.triton.pack.record import LARGEST_CODE, Code, Kernel, from_dict
from elsa_core.base.files import flush, scratch, umask
from elsa_core.errors import UnavailableError

SCHEMA = 1
INDEX = "index.json"
# The format's limits: what is larger is refused unread.
LARGEST_INDEX = 1 << 24
LARGEST_DATA = 1 << 28
MOST_KERNELS = 20000
_NAME = re.compile(r"(cubins|ptx)-[0-9a-f]{16}\.bin")
_KEY = re.compile(r"[0-9a-f]{64}")
_TAIL = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\n\}\n')
_TAIL_BYTES = 81
_ATTEMPTS = 2
_DAMAGED = "build it again: elsa build --cuda"


@dataclass(frozen=True)
class Entry:
    """One kernel of a pack.

    Attributes:
        kernel: what a launch needs.
        facts: what it was compiled from, for people.
        metadata: what Triton's compiler adds to its options and a launch by Triton needs.
    """

    kernel: Kernel
    facts: dict[str, Any]
    metadata: dict[str, Any]


class Pack:
    """A pack that was read: its index checked, its data files open.

    Attributes:
        folder: where it lies.
        arch: 90 for sm_90.
        triton: the version of Triton whose kernels these are.
        sources: `sources.sources_digest` of its build.
        source_keys: `sources.source_key` of each kernel, by name.
        entries: kernels by key.
    """

    def __init__(self, folder: Path, header: dict[str, Any], trusted: bool):
        self.folder = folder
        self.arch: int = header["arch"]
        self.triton: str = header["triton"]
        self.elsa: str = header["elsa"]
        self.sources: str = header["sources"]
        self.source_keys: dict[str, str] = header["source_keys"]
        self.cubins = _Data(folder, header["cubins"], trusted)
        self.ptx = None if header["ptx"] is None else _Data(folder, header["ptx"], trusted)
        sizes = self.cubins.size, 0 if self.ptx is None else self.ptx.size
        self.entries = {
            key: Entry(from_dict(row["kernel"], *sizes), row["facts"], row["metadata"])
            for key, row in header["kernels"].items()
        }

    def cubin(self, kernel: Kernel) -> bytes:
        """A kernel's code.

        Raises:
            UnavailableError: its bytes are not those that were written.
        """
        return self.cubins.read(kernel.cubin)

    def ptx_of(self, kernel: Kernel) -> bytes | None:
        """A kernel's PTX, where the pack has it: there it is deflated (RFC 1950).

        Raises:
            UnavailableError: its bytes are not those that were written.
        """
        if self.ptx is None or kernel.ptx is None:
            return None
        inflate, whole = zlib.decompressobj(), False
        with contextlib.suppress(zlib.error):
            text = inflate.decompress(self.ptx.read(kernel.ptx), LARGEST_CODE)
            whole = inflate.eof
        if not whole:
            raise UnavailableError(f"the kernel pack {self.ptx.path} is damaged; {_DAMAGED}")
        return text

    def verify(self) -> None:
        """Read every byte of the data files.

        Raises:
            UnavailableError: one is not what was written.
        """
        for data in (self.cubins, self.ptx):
            if data is not None:
                data.verify()

    @property
    def bytes(self) -> int:
        """Size of the data files."""
        return self.cubins.size + (0 if self.ptx is None else self.ptx.size)


class _Data:
    """A data file, kept open: what replaces the pack takes nothing from it."""

    def __init__(self, folder: Path, facts: dict[str, Any], trusted: bool):
        name, self.size, self.sha256 = facts["name"], facts["bytes"], facts["sha256"]
        if not _NAME.fullmatch(name) or not _KEY.fullmatch(self.sha256):
            raise ValueError(f"data file {name!r}")
        if type(self.size) is not int or not 0 <= self.size <= LARGEST_DATA:
            raise ValueError(f"a data file of {self.size!r} bytes")
        self.path = folder / name
        self.descriptor = _opened(self.path, trusted)
        weakref.finalize(self, os.close, self.descriptor)
        if os.fstat(self.descriptor).st_size != self.size:
            raise ValueError(f"{name} does not have its {self.size} bytes")

    def read(self, code: Code) -> bytes:
        return self._checked(code.offset, code.size, code.sha256)

    def verify(self) -> None:
        self._checked(0, self.size, self.sha256)

    def _checked(self, offset: int, size: int, digest: str) -> bytes:
        content = os.pread(self.descriptor, size, offset)
        if hashlib.sha256(content).hexdigest() != digest:
            raise UnavailableError(f"the kernel pack {self.path} is damaged; {_DAMAGED}")
        return content


def read(folder: Path, *, trusted: bool = False) -> Pack:
    """The pack in a folder.

    Args:
        folder: of one architecture.
        trusted: whoever may write there may also change this package's own code.

    Raises:
        FileNotFoundError: there is none.
        UnavailableError: it is damaged, of another format, or other users could have written it.
    """
    if not trusted and (reason := cache.not_own(folder)):
        raise UnavailableError(f"the kernel pack is not used: {reason}")
    for _ in range(_ATTEMPTS):
        # another process may replace it between the two files
        with contextlib.suppress(FileNotFoundError):
            return _read(folder, trusted)
    return _read(folder, trusted)


def _read(folder: Path, trusted: bool) -> Pack:
    path = folder / INDEX
    try:
        return Pack(folder, _header(_content(path, trusted)), trusted)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UnavailableError(
            f"{path} is no index of a kernel pack ({reason}); {_DAMAGED}"
        ) from None
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnavailableError(f"the kernel pack {folder} cannot be read: {reason}") from None


def _content(path: Path, trusted: bool) -> bytes:
    with open(_opened(path, trusted), "rb") as file:  # of a descriptor
        content = file.read(LARGEST_INDEX + 1)
    if len(content) > LARGEST_INDEX:
        raise ValueError(f"above {LARGEST_INDEX} bytes")
    return content


def _opened(path: Path, trusted: bool) -> int:
    """A descriptor of a plain file that no other user may have written.

    Raises:
        OSError: it cannot be opened.
        UnavailableError: it is a link or a device, or other users could have written it.
    """
    descriptor = cache.open_own(path, anyone=trusted)
    if descriptor is None:
        raise UnavailableError(
            f"the kernel pack is not used: {path} is no plain file that only you can write"
        )
    return descriptor


def _header(content: bytes) -> dict[str, Any]:
    found = _TAIL.fullmatch(content[-_TAIL_BYTES:])
    body = content[:-_TAIL_BYTES]
    if found is None or hashlib.sha256(body).hexdigest() != found[1].decode():
        raise ValueError("its digest is another")
    header: dict[str, Any] = json.loads(content)
    if header["schema"] != SCHEMA:
        raise ValueError(f"format {header['schema']!r}, this is {SCHEMA}")
    if type(header["arch"]) is not int:
        raise ValueError(f"architecture {header['arch']!r}")
    if len(header["kernels"]) > MOST_KERNELS or not all(map(_KEY.fullmatch, header["kernels"])):
        raise ValueError("kernels without proper keys")
    if not _is_texts(header["source_keys"]):
        raise ValueError("source keys that are no texts by name")
    for row in header["kernels"].values():
        metadata = row["metadata"]
        if type(metadata) is not dict or not all(map(str.isidentifier, metadata)):
            raise ValueError("metadata without proper names")
    return header


def _is_texts(given: Any) -> bool:
    return type(given) is dict and all(type(text) is str for text in given.values())


def write(
    folder: Path, header: dict[str, Any], entries: dict[str, Entry], cubins: dict[str, bytes],
    ptx: dict[str, bytes] | None,
) -> None:  # fmt: skip
    """Put a pack into a folder, whole or not at all; equal arguments give equal bytes.

    The data comes first, the index last and in one step, so that a reader finds the old pack or the
    new one. What the old index named goes in the end.

    Args:
        folder: of one architecture; its parent is there.
        header: `arch`, `triton`, `elsa`, `sources` and `source_keys` of `Pack`.
        entries: kernels by key; where their code lies is filled in here.
        cubins: code by key.
        ptx: PTX by key; None for a pack without.

    Raises:
        OSError: it cannot be written.
        UnavailableError: another process has held the folder's lock for too long.
    """
    keys = sorted(entries)
    places, data = {}, {}
    places["cubin"], data["cubins"] = _joined([cubins[key] for key in keys])
    if ptx is not None:
        places["ptx"], data["ptx"] = _joined([zlib.compress(ptx[key], 9) for key in keys])
    rows = {}
    for position, key in enumerate(keys):
        entry = entries[key]
        at = {name: found[position] for name, found in places.items()}
        kernel = {**entry.kernel.to_dict(), "ptx": None, **at}
        rows[key] = {"kernel": kernel, "facts": entry.facts, "metadata": entry.metadata}
    files = {name: _named(name, content) for name, content in data.items()}
    whole = {
        "schema": SCHEMA, **header, "cubins": files["cubins"], "ptx": files.get("ptx"),
        "kernels": rows,
    }  # fmt: skip
    contents = {files[name]["name"]: content for name, content in data.items()}
    _place(folder, {**contents, INDEX: _sealed(whole)})


def _joined(parts: list[bytes]) -> tuple[list[dict[str, Any]], bytes]:
    """Where each part lies in all of them, one behind the other; equal parts are there once."""
    found: dict[str, dict[str, Any]] = {}
    places, chunks, offset = [], [], 0
    for part in parts:
        digest = hashlib.sha256(part).hexdigest()
        if digest not in found:
            found[digest] = {"offset": offset, "size": len(part), "sha256": digest}
            chunks.append(part)
            offset += len(part)
        places.append(found[digest])
    return places, b"".join(chunks)


def _named(name: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    return {"name": f"{name}-{digest[:16]}.bin", "bytes": len(content), "sha256": digest}


def _sealed(header: dict[str, Any]) -> bytes:
    """The index with its digest: of all bytes before the last member."""
    body = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()[:-1]
    digest = hashlib.sha256(body).hexdigest()
    return body + f',\n"sha256": "{digest}"\n}}\n'.encode()


def _place(folder: Path, contents: dict[str, bytes]) -> None:
    cache.make(folder)
    with (
        cache.locked(folder / INDEX, "kernel pack", lambda line: None),
        scratch(".pack-", folder=folder) as staging,
    ):
        for name, content in contents.items():
            (staging / name).write_bytes(content)
            (staging / name).chmod(0o644 & ~umask())
            flush(staging / name)
        for name in contents:  # the index is the last
            (staging / name).replace(folder / name)
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name) and path.name not in contents:
                with contextlib.suppress(OSError):
                    path.unlink()
