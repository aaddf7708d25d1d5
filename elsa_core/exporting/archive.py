"""A bundle as one zip file: written plainly, read as if it were hostile."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from elsa_core.base.files import scratch
from elsa_core.base.reading import open_regular
from elsa_core.errors import ElsaError, ModelError, UnavailableError
from elsa_core.exporting.manifest import (
    MANIFEST_NAME,
    MAX_BYTES,
    MAX_FILES,
    FileEntry,
    files_in,
    inside,
    parse_manifest,
)
from elsa_core.exporting.signature import SIGNATURE_BYTES, SIGNATURE_NAME

# Deflate reaches 1032:1 on zeros; weights hardly compress at all.
LARGEST_RATIO = 100
SLACK = 64 << 20
# Reading these is bounded by what is asked for; bzip2 and LZMA make gigabytes of a few bytes.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BLOCK = 1 << 20
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
# What zipfile and its decompressors raise over bytes that are not what they should be.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError,
    RuntimeError, ValueError,
)  # fmt: skip
# Errors of the system that a name or an offset in the archive causes, never the disk.
_DAMAGE_NUMBERS = (
    None, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ,
)  # fmt: skip


def write_zip(directory: Path, target: Path) -> None:
    """Pack a bundle without compression, files in order and with one date, under no folder."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for path in files_in(directory):
            info = zipfile.ZipInfo(path.relative_to(directory).as_posix(), _ZIP_EPOCH)
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            # Known sizes spare the headers of huge files a second pass.
            info.file_size = path.stat().st_size
            with path.open("rb") as source, archive.open(info, "w") as sink:
                shutil.copyfileobj(source, sink, _BLOCK)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """A bundle's directory: `path` itself, or a zip unpacked into a directory that vanishes.

    Raises ModelError over links, paths outside, names that occur twice or are another's folder, and
    more data than a bundle holds; UnavailableError where the disk cannot hold it.
    """
    if path.is_dir():
        yield path
        return
    if not path.is_file():
        raise ModelError(f"no such bundle: {path}")
    with open_regular(path) as given, scratch("elsa-bundle-") as target:
        if not zipfile.is_zipfile(given):
            raise ModelError(f"{path} is neither a directory nor a zip file: no bundle")
        try:
            with zipfile.ZipFile(given) as archive:
                _extract(archive, target, path, os.fstat(given.fileno()).st_size)
        except ElsaError:
            raise
        except _DAMAGE as error:
            raise ModelError(f"{path} is a damaged zip file: {error}") from None
        except OSError as error:
            if error.errno not in _DAMAGE_NUMBERS:
                raise
            raise ModelError(f"{path} is a damaged zip file: {error.strerror or error}") from None
        yield target


def _extract(archive: zipfile.ZipFile, target: Path, path: Path, size: int) -> None:
    entries, wanted = _checked(archive, path, size), dict[str, FileEntry]()
    for name, limit in ((MANIFEST_NAME, MAX_BYTES), (SIGNATURE_NAME, SIGNATURE_BYTES)):
        if name not in entries:  # it is not signed
            continue
        with archive.open(entries.pop(name)) as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ModelError(f"{path}: {name} is larger than {limit} bytes")
        (target / name).write_bytes(content)
        if name == MANIFEST_NAME:
            wanted = parse_manifest(content, f"{path}/{name}").files
    total = sum(entry.file_size for entry in entries.values())
    free = shutil.disk_usage(target).free
    if total > free:
        raise UnavailableError(
            f"{path} unpacks to {total} bytes and {free} are free in {target.parent}"
        )
    for name, entry in entries.items():
        # What the manifest does not name is not unpacked: the verification reports it as extra.
        left = min(entry.file_size, wanted[name].size if name in wanted else 0)
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, place.open("xb") as sink:
            while left > 0 and (block := source.read(min(_BLOCK, left))):
                left -= len(block)
                sink.write(block)


def _checked(archive: zipfile.ZipFile, path: Path, size: int) -> dict[str, zipfile.ZipInfo]:
    entries: dict[str, zipfile.ZipInfo] = {}
    infos = archive.infolist()
    if len(infos) > MAX_FILES:
        raise ModelError(f"{path} holds {len(infos)} entries: no bundle")
    for info in infos:
        folder = info.filename.endswith("/")  # is_dir fails on an empty name
        name = info.filename.rstrip("/") if folder else info.filename
        mode = stat.S_IFMT(info.external_attr >> 16)
        if not inside(name):
            raise ModelError(f"{path}: the path {name[:120]!r} leads outside the bundle")
        for good, words in (
            (mode in (0, stat.S_IFREG, stat.S_IFDIR), "is a link or a device, not a file"),
            (info.compress_type in _METHODS, "is neither stored nor deflated"),
            (not info.flag_bits & 0x1, "is encrypted"),
            (folder or name not in entries, "occurs twice"),
        ):
            if not good:
                raise ModelError(f"{path}: {name[:120]!r} {words}")
        if not folder:
            entries[name] = info
    for name in entries:
        for parent in map(str, PurePosixPath(name).parents):
            if parent in entries:
                raise ModelError(f"{path}: {parent[:120]!r} is both a file and a folder")
    if MANIFEST_NAME not in entries:
        raise ModelError(f"{path} is no bundle: it holds no {MANIFEST_NAME}")
    total = sum(entry.file_size for entry in entries.values())
    if total > LARGEST_RATIO * size + SLACK:
        raise ModelError(f"{path} claims to unpack {size} bytes to {total}: refused as a zip bomb")
    return entries
