"""Files written whole or not at all: beside the target first, renamed into place at the end."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elsa_core.errors import ArgumentError, ElsaError, UnavailableError

_RENAME_EXCHANGE = 2  # of renameat2 in linux/fs.h
_AT_FDCWD = -100
_umask_lock = threading.Lock()


def located(given: str | os.PathLike[str], error: type[ElsaError] = ArgumentError) -> Path:
    """Return `given` with "~" expanded; an error of that class where it cannot be looked up."""
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"the path must be text or a pathlib.Path, not {type(given).__name__}")
    try:
        path = Path(given).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, RuntimeError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{os.fspath(given)[:120]} cannot be used as a path: {reason}") from None
    return path


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Give a fresh directory beside `target` that becomes it on success and vanishes otherwise."""
    with parents_made(target), scratch(hidden(target), ".tmp", target.parent) as staging:
        yield staging
        # A scratch directory is one that only its owner may enter.
        staging.chmod(0o777 & ~umask())
        _swap(staging, target)


@contextmanager
def scratch(prefix: str, suffix: str = "", folder: Path | None = None) -> Iterator[Path]:
    """Give a fresh directory that only this user may enter, and remove it at the end."""
    path = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def parents_made(target: Path) -> Iterator[None]:
    """Make the missing parents of `target`, and remove those again where what follows fails."""
    missing = [path for path in target.parents if not path.exists()][::-1]
    made: list[Path] = []
    try:
        for path in missing:
            with suppress(FileExistsError):  # another call made it meanwhile
                path.mkdir()
                made.append(path)
        yield
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):  # something is in it
                path.rmdir()
        raise


def hidden(target: Path) -> str:
    """How the name of what becomes `target` starts; short, for a name may have 255 bytes."""
    name = target.name
    if len(name) > 48:  # two long names may start alike
        name = f"{name[:39]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"
    return f".{name}."


def _swap(staging: Path, target: Path) -> None:
    """Give `staging` the name of `target`; what has it so far is in the place of `staging` then. In
    one step where system and file system can (renameat2 of Linux), else the old target comes back
    if the second step fails."""
    if not target.exists():
        staging.rename(target)
        return
    if _exchanged(staging, target):
        return
    old = staging.with_suffix(".old")
    try:
        target.rename(old)
        staging.rename(target)
    finally:
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(target)


def _exchanged(first: Path, second: Path) -> bool:
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    names = (os.fsencode(first.absolute()), os.fsencode(second.absolute()))
    failed = rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))
    return not failed


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Give an empty file beside `path` that becomes it on success and vanishes otherwise."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=hidden(path), suffix=".tmp")
    os.close(handle)
    staging = Path(name)
    try:
        yield staging
        # mkstemp makes files that only their owner may read.
        staging.chmod(0o666 & ~umask())
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def write_text(text: str, path: Path) -> Path:
    """Write a file whole or not at all; on OSError `path` is as it was."""
    with staged_file(path) as staging:
        staging.write_text(text, encoding="utf-8")
    return path


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file into a staged directory, and have it on the disk."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    flush(path)


def flush(path: Path) -> None:
    """Have the bytes on the disk before the rename: a crash must not leave an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def umask() -> int:
    """The permission bits that new files of this process lack."""
    with _umask_lock:  # two threads at once would leave the process another mask
        mask = os.umask(0o077)
        os.umask(mask)
    return mask


def explained(error: OSError, given: Path) -> ArgumentError | UnavailableError:
    """What a user is told where writing `given` failed."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", -1)):
        return UnavailableError(f"{given} (-o) cannot be written: {reason}; free some space")
    return ArgumentError(f"{given} (-o) cannot be written: {reason}")
