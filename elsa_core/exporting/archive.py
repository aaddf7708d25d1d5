"""A bundle as one zip file: written plainly, read as if it were hostile."""

from __future__ import annotations

import errno
import lzma
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from elsa_core.errors import ElsaError, ModelError, UnavailableError
from elsa_core.exporting.manifest import (
    MANIFEST_NAME,
    MAX_BYTES,
    MAX_FILES,
    files_in,
    inside,
    parse_manifest,
)

# Deflate reaches 1032:1 on zeros; weights hardly compress at all.
LARGEST_RATIO = 100
SLACK = 64 << 20
_BLOCK = 1 << 20
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
# What zipfile and its decompressors raise over bytes that are not what they should be.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, NotImplementedError,
    RuntimeError, ValueError,
)  # fmt: skip
# Errors of the system that a name or an offset in the archive causes, never the disk; bz2 gives
# no number at all.
_DAMAGE_NUMBERS = (
    None, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ,
)  # fmt: skip


def write_zip(directory: Path, target: Path) -> None:
    """Pack a bundle without compression, files in order and with one date, under no folder.

    Raises:
        OSError: the target cannot be written.
    """
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

    Raises:
        ModelError: no bundle, or a zip that is not one: links, paths outside, names that occur
            twice or are another's folder, more data than it holds.
        UnavailableError: no room to unpack it.
    """
    if path.is_dir():
        yield path
        return
    if not path.is_file():
        raise ModelError(f"no such bundle: {path}")
    if not zipfile.is_zipfile(path):
        raise ModelError(f"{path} is neither a directory nor a zip file: no bundle")
    with TemporaryDirectory(prefix="elsa-bundle-") as scratch:
        target = Path(scratch)
        try:
            with zipfile.ZipFile(path) as archive:
                _extract(archive, target, path)
        except ElsaError:
            raise
        except _DAMAGE as error:
            raise ModelError(f"{path} is a damaged zip file: {error}") from None
        except OSError as error:
            if error.errno not in _DAMAGE_NUMBERS:
                raise
            raise ModelError(f"{path} is a damaged zip file: {error.strerror or error}") from None
        yield target


def _extract(archive: zipfile.ZipFile, target: Path, path: Path) -> None:
    entries = _checked(archive, path)
    manifest = entries.pop(MANIFEST_NAME)
    with archive.open(manifest) as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ModelError(f"{path}: {MANIFEST_NAME} is larger than {MAX_BYTES} bytes")
    try:
        wanted = parse_manifest(text.decode("utf-8"), f"{path}/{MANIFEST_NAME}").files
    except UnicodeDecodeError:
        raise ModelError(f"{path}: {MANIFEST_NAME} is not UTF-8 text") from None
    total = sum(entry.file_size for entry in entries.values())
    free = shutil.disk_usage(target).free
    if total > free:
        raise UnavailableError(
            f"{path} unpacks to {total} bytes and {free} are free in {target.parent}"
        )
    (target / MANIFEST_NAME).write_bytes(text)
    for name, entry in entries.items():
        # What the manifest does not name is not unpacked: the verification reports it as extra.
        limit = wanted[name].size if name in wanted else 0
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, place.open("xb") as sink:
            _copy(source, sink, min(entry.file_size, limit))


def _copy(source: object, sink: object, limit: int) -> None:
    while limit > 0:
        block = source.read(min(_BLOCK, limit))  # type: ignore[attr-defined]
        if not block:
            return
        limit -= len(block)
        sink.write(block)  # type: ignore[attr-defined]


def _checked(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    entries: dict[str, zipfile.ZipInfo] = {}
    infos = archive.infolist()
    if len(infos) > MAX_FILES:
        raise ModelError(f"{path} holds {len(infos)} entries: no bundle")
    for info in infos:
        folder = info.filename.endswith("/")  # is_dir fails on an empty name
        name = info.filename.rstrip("/") if folder else info.filename
        if not inside(name):
            raise ModelError(f"{path}: the path {name[:120]!r} leads outside the bundle")
        mode = stat.S_IFMT(info.external_attr >> 16)
        if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ModelError(f"{path}: {name[:120]!r} is a link or a device, not a file")
        if info.flag_bits & 0x1:
            raise ModelError(f"{path}: {name[:120]!r} is encrypted")
        if folder:
            continue
        if name in entries:
            raise ModelError(f"{path}: {name[:120]!r} occurs twice")
        entries[name] = info
    _check_folders(entries, path)
    if MANIFEST_NAME not in entries:
        raise ModelError(f"{path} is no bundle: it holds no {MANIFEST_NAME}")
    total = sum(entry.file_size for entry in entries.values())
    if total > LARGEST_RATIO * path.stat().st_size + SLACK:
        raise ModelError(
            f"{path} claims to unpack {path.stat().st_size} bytes to {total}: refused as a zip bomb"
        )
    return entries


def _check_folders(names: Collection[str], path: Path) -> None:
    for name in names:
        for parent in map(str, PurePosixPath(name).parents):
            if parent in names:
                raise ModelError(f"{path}: {parent[:120]!r} is both a file and a folder")
