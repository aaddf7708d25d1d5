"""manifest.json: what a bundle holds; written by export, and hostile until checked when read."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from elsa_core.base.reading import parse_json, read_bytes
from elsa_core.errors import ModelError
from elsa_core.exporting.signature import SIGNATURE_NAME

LARGEST_BATCH = 64  # that an artefact is verified at
# Operating system and architecture, as libraries are made for them: "linux-x86_64".
PLATFORM = f"{platform.system()}-{platform.machine()}".lower()

MANIFEST_NAME = "manifest.json"
KIND = "elsa-bundle"
SCHEMA_VERSION = 1
REFERENCE_NAME = "reference.npz"
MAX_BYTES = 16_000_000
MAX_FILES = 10_000
MAX_DEPTH = 32
MAX_TENSORS = 1000  # inputs, and outputs: models may give every layer's state
FILES = {
    "torchscript": "model.ts",
    "onnx": "model.onnx",
    "pt2": "model.pt2",
    "aoti": "model.aoti.pt2",
    "onnx-int8": "model.int8.onnx",
}
_BLOCK = 1 << 20
_NOT_PLAIN = "{} is a link or a device: a bundle holds plain files alone"


@dataclass(frozen=True)
class FileEntry:
    """One file of a bundle: its size in bytes and its SHA-256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A manifest whose paths, files and artefacts have been checked; `content` is all of it.

    `artefacts` are those of each format: its file, operators and notes. `raw` are the bytes that
    were read, which a signature is about.
    """

    content: dict[str, Any]
    files: dict[str, FileEntry]
    artefacts: dict[str, dict[str, Any]]
    raw: bytes


def hashed(path: Path, limit: int | None = None, copy: Path | None = None) -> FileEntry:
    """Size and hash of a plain file, opened once; not read further than one byte past `limit`. The
    bytes that are hashed are written to `copy`, a new file."""
    digest, size = hashlib.sha256(), 0
    with open_plain(path) as file, nullcontext() if copy is None else copy.open("xb") as sink:
        while block := file.read(_BLOCK if limit is None else min(_BLOCK, limit + 1 - size)):
            digest.update(block)
            size += len(block)
            if sink is not None:
                sink.write(block)
    return FileEntry(size, digest.hexdigest())


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading; raises ModelError over a link, pipe or device, judged after it has
    been opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        if not path.is_symlink():
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return open(descriptor, "rb")  # noqa: PTH123  # of a descriptor
        os.close(descriptor)
    raise ModelError(_NOT_PLAIN.format(path))


def files_in(directory: Path) -> list[Path]:
    """Every file below a directory, in order. Raises ModelError over a link, a device, and more
    entries, or folders in folders, than a bundle has."""
    found: list[Path] = []
    folders = [directory]
    while folders:
        folder = folders.pop()
        if len(folder.relative_to(directory).parts) > MAX_DEPTH:
            raise ModelError(f"{directory} holds more than {MAX_DEPTH} nested folders: no bundle")
        for path in folder.iterdir():
            # asked first: to follow a link may fail, or lead outside
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ModelError(_NOT_PLAIN.format(path))
            (folders if path.is_dir() else found).append(path)
            if len(found) + len(folders) > MAX_FILES:
                raise ModelError(f"{directory} holds more than {MAX_FILES} entries: no bundle")
    return sorted(found)


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a bundle directory.

    Raises ModelError: there is none, it is malformed, of a newer schema, or names a path outside.
    """
    path = directory / MANIFEST_NAME
    if path.is_symlink() or not path.is_file():
        raise ModelError(f"{directory} is no bundle: it holds no regular file {MANIFEST_NAME}")
    return parse_manifest(read_bytes(path, MAX_BYTES), str(path))


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Check a manifest's bytes: all that a verification reads has its type."""
    try:
        content = parse_json(raw.decode("utf-8"), where)
    except UnicodeDecodeError:
        raise ModelError(f"{where} is not UTF-8 text: no manifest") from None

    def require(good: object, words: str) -> None:
        if not good:
            raise ModelError(f"{where}{words}")

    require(content.get("kind") == KIND, " is not the manifest of an elsa bundle")
    version: Any = content.get("schema_version")
    require(type(version) is int and version >= 1, " has no schema_version")
    words = f" has schema_version {str(version)[:20]}, this elsa reads up to {SCHEMA_VERSION}"
    require(version <= SCHEMA_VERSION, f"{words}: update elsa")
    entries: Any = content.get("files")
    good: object = isinstance(entries, dict) and 0 < len(entries) <= MAX_FILES
    require(good, f": files must be an object with 1 to {MAX_FILES} entries")
    for name, entry in entries.items():
        good = inside(name) and name not in (MANIFEST_NAME, SIGNATURE_NAME)
        require(good, f": the path {name[:120]!r} leads outside the bundle")
        require(_fits(entry, _FILE), f": {name[:120]!r} must have a size and a sha256")
    files = {name: FileEntry(one["size"], one["sha256"]) for name, one in entries.items()}
    artefacts: Any = content.get("artefacts")
    good = isinstance(artefacts, dict) and artefacts and set(artefacts) <= set(FILES)
    require(good, f": artefacts must name some of {', '.join(FILES)}")
    for name, artefact in artefacts.items():
        good = _fits(artefact, {"file": lambda given: isinstance(given, str)})
        require(good, f": the artefact {name} names no file")
        used, runtime = artefact.get("operators", []), artefact.get("runtime", {})
        good = isinstance(runtime, dict) and _fits([*runtime.values()], [_is_text])
        good = good and _fits(used, [_is_text])
        require(good, f": the artefact {name} has malformed operators or runtime")
    libraries: Any = content.get("artefacts_libraries")
    good = isinstance(libraries, dict)
    good = good and all(isinstance(libraries.get(key), list) for key in ("torch", "onnxruntime"))
    require(good, ": artefacts_libraries must list torch's and onnxruntime's")
    on_gpu = libraries.get("cuda", [])
    good = isinstance(on_gpu, list) and len(on_gpu) in (0, 2)
    require(good, ": artefacts_libraries must name a library and its plans for cuda")
    named = [artefact["file"] for artefact in artefacts.values()]
    for file in (*named, *libraries["torch"], *libraries["onnxruntime"], *on_gpu):
        good = isinstance(file, str) and file in files
        require(good, f": {str(file)[:120]!r} is used and not among the files")
    good = _fits(content, _FACTS) and content["reference"]["batch_sizes"]
    good = good and all(0 < len(content[key]) <= MAX_TENSORS for key in ("inputs", "outputs"))
    require(good, ": model, inputs, outputs, operators or reference is malformed")
    return Manifest(content, files, artefacts, raw)


def _is_text(value: Any) -> bool:
    """Whether a value may be shown on a terminal as it is."""
    return isinstance(value, str) and value.isprintable() and len(value) < 4096


def _fits(value: Any, form: Any) -> bool:
    """Whether a value has a form: an object of named forms, a list of one, or what a predicate
    takes."""
    if isinstance(form, dict):
        given = value if isinstance(value, dict) else {}
        return value is given and all(_fits(given.get(key), one) for key, one in form.items())
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    return bool(form(value))


_FILE = {
    "size": lambda n: type(n) is int and 0 <= n < 2**63,
    "sha256": lambda given: isinstance(given, str) and re.fullmatch(r"[0-9a-f]{64}", given),
}
_TENSOR = {
    "name": _is_text,
    "dtype": _is_text,
    "shape": [lambda size: type(size) is int or _is_text(size)],
}
_FACTS = {
    "elsa_version": _is_text,
    "model": {
        "name": _is_text,
        "weights": _is_text,
        "dtype": lambda given: given in ("float32", "float16", "bfloat16"),
        "device": lambda given: given in ("cpu", "cuda"),
    },
    "inputs": [_TENSOR],
    "outputs": [_TENSOR],
    "operators": {},
    "reference": {
        "batch_sizes": [lambda size: type(size) is int and 0 < size <= LARGEST_BATCH],
        "original_norms": {},
    },
}


def inside(name: str) -> bool:
    """Whether a relative path, in POSIX form, stays inside the bundle."""
    path = PurePosixPath(name)
    return bool(
        name
        and name.isprintable()
        and len(name.encode()) <= 255  # what file systems count
        and "\\" not in name
        and ":" not in name
        and not path.is_absolute()
        and str(path) == name
        and path.parts
        and ".." not in path.parts
        and "." not in path.parts
    )
