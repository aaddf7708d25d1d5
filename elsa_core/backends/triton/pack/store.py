"""The file of a pack: an index of its kernels, and their code.

    <folder>/sm_90/kernels.pack    SHA-256 of the index and its length in bytes (64 and 16 digits),
                                   the index as JSON, the code of one kernel behind the other

A pack is code that the GPU runs with the user's rights. It is read only where its folder and file
belong to this user or root and no other user can write to them, as `elsa_core.backends.cache` has
it. Every byte is under a digest: the index under the file's first, each kernel's code under one
that the index holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elsa_core.backends import cache
from elsa_core.base.files import flush, scratch, umask
from elsa_core.errors import UnavailableError

SCHEMA = 2
NAME = "kernels.pack"
# The format's limits: what is larger is refused unread.
LARGEST_INDEX = 1 << 24
LARGEST_CODE = 1 << 24
_HEAD = re.compile(rb"([0-9a-f]{64})([0-9]{16})")
_HEAD_BYTES = 80
_KEY = re.compile(r"[0-9a-f]{64}")
_DAMAGED = "build it again: elsa build --cuda"


@dataclass(frozen=True)
class Entry:
    """One kernel of a pack: what Triton's compiler adds to its options, and the code's offset and
    size in bytes and SHA-256.
    """

    metadata: dict[str, Any]
    offset: int
    size: int
    sha256: str

    def check(self, total: int) -> None:
        """Raise ValueError where no code of a pack with `total` bytes of code can be so."""
        if type(self.metadata) is not dict or not all(map(str.isidentifier, self.metadata)):
            raise ValueError("metadata without proper names")
        if type(self.offset) is not int or type(self.size) is not int or self.offset < 0:
            raise ValueError(f"code of {self.size!r} bytes at {self.offset!r}")
        if not 0 < self.size <= min(LARGEST_CODE, total - self.offset):
            raise ValueError(f"code of {self.size} bytes at {self.offset} of {total}")
        if not _KEY.fullmatch(self.sha256):
            raise ValueError("code without a digest")


class Pack:
    """A pack that was read: its index checked, its file kept open, so that what replaces it takes
    nothing from it. triton: the version whose kernels these are. sources: the
    `specialize.sources_digest` of its build. entries: kernels by key. bytes: of all code.
    """

    def __init__(self, folder: Path, descriptor: int):
        self.folder, self._descriptor = folder, descriptor
        weakref.finalize(self, os.close, descriptor)
        head = _HEAD.fullmatch(os.pread(descriptor, _HEAD_BYTES, 0))
        if head is None or int(head[2]) > LARGEST_INDEX:
            raise ValueError("it does not begin as a pack does")
        self._start = _HEAD_BYTES + int(head[2])
        index = os.pread(descriptor, int(head[2]), _HEAD_BYTES)
        if hashlib.sha256(index).hexdigest() != head[1].decode():
            raise ValueError("the digest of its index is another")
        header = json.loads(index)
        if header["schema"] != SCHEMA:
            raise ValueError(f"format {header['schema']!r}, this is {SCHEMA}")
        if type(header["arch"]) is not int:
            raise ValueError(f"architecture {header['arch']!r}")
        self.arch: int = header["arch"]
        self.triton: str = header["triton"]
        self.sources: str = header["sources"]
        self.bytes: int = header["bytes"]
        if os.fstat(descriptor).st_size != self._start + self.bytes:
            raise ValueError(f"it does not hold {self.bytes} bytes of code")
        self.entries = {key: Entry(**row) for key, row in header["kernels"].items()}
        if not all(map(_KEY.fullmatch, self.entries)):
            raise ValueError("kernels without proper keys")
        for entry in self.entries.values():
            entry.check(self.bytes)

    def cubin(self, entry: Entry) -> bytes:
        """A kernel's code.

        Raises:
            UnavailableError: its bytes are not those that were written.
        """
        content = os.pread(self._descriptor, entry.size, self._start + entry.offset)
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise UnavailableError(f"the kernel pack {self.folder / NAME} is damaged; {_DAMAGED}")
        return content


def read(folder: Path) -> Pack:
    """The pack in a folder, which is of one architecture.

    Raises:
        FileNotFoundError: there is none.
        UnavailableError: it is damaged, of another format, or other users could have written it.
    """
    if reason := cache.not_own(folder):
        raise UnavailableError(f"the kernel pack is not used: {reason}")
    path = folder / NAME
    try:
        descriptor = cache.open_own(path)
        if descriptor is None:
            raise UnavailableError(
                f"the kernel pack is not used: {path} is no plain file that only you can write"
            )
        return Pack(folder, descriptor)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UnavailableError(f"{path} is no kernel pack ({reason}); {_DAMAGED}") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnavailableError(f"the kernel pack {folder} cannot be read: {reason}") from None


def write(
    folder: Path, header: dict[str, Any], kernels: dict[str, tuple[dict[str, Any], bytes]]
) -> None:
    """Put a pack into a folder, whole or not at all; equal arguments give equal bytes.

    header: `arch`, `triton` and `sources` of `Pack`, and the version of elsa. kernels: metadata and
    code by key; equal code is written once. Raises OSError where it cannot be written.
    """
    rows, places, code = {}, dict[str, int](), bytearray()
    for key, (metadata, content) in sorted(kernels.items()):
        digest = hashlib.sha256(content).hexdigest()
        if digest not in places:
            places[digest] = len(code)
            code += content
        rows[key] = asdict(Entry(metadata, places[digest], len(content), digest))
    whole = {"schema": SCHEMA, **header, "bytes": len(code), "kernels": rows}
    index = json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()
    cache.make(folder)
    with scratch(".pack-", folder=folder) as staging:
        made = staging / NAME
        made.write_bytes(f"{hashlib.sha256(index).hexdigest()}{len(index):016}".encode())
        with made.open("ab") as file:
            file.write(index + code)
        made.chmod(0o644 & ~umask())
        flush(made)
        made.replace(folder / NAME)
