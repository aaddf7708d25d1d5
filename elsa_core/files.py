"""Files written whole or not at all: beside the target first, renamed into place at the end."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elsa_core.errors import ArgumentError, ElsaError, UnavailableError


def located(given: str | os.PathLike[str], error: type[ElsaError] = ArgumentError) -> Path:
    """Return `given` with "~" expanded, a path that can be looked up, whether it exists or not.

    Raises:
        ElsaError: of class `error`: nobody's home, a name that is too long, a loop of links.
    """
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
    with parents_made(target):
        staging = Path(tempfile.mkdtemp(prefix=hidden(target), suffix=".tmp", dir=target.parent))
        try:
            yield staging
            # mkdtemp makes directories that only their owner may enter.
            staging.chmod(0o777 & ~umask())
            _swap(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def parents_made(target: Path) -> Iterator[None]:
    """Make the missing parents of `target`, and remove those again where what follows fails."""
    missing = [path for path in target.parents if not path.exists()][::-1]
    made: list[Path] = []
    try:
        for path in missing:
            path.mkdir()
            made.append(path)
        yield
    except BaseException:
        for path in reversed(made):
            _remove_if_empty(path)
        raise


def hidden(target: Path) -> str:
    """How the name of what becomes `target` starts; short, for a name may have 255 bytes."""
    return f".{target.name[:48]}."


def _swap(staging: Path, target: Path) -> None:
    """Rename `staging` to `target`; the old target comes back if that fails."""
    if not target.exists():
        staging.rename(target)
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


def _remove_if_empty(path: Path) -> None:
    """Remove a directory unless something is in it."""
    try:
        path.rmdir()
    except OSError:
        return


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Give an empty file beside `path` that becomes it on success and vanishes otherwise."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=hidden(path))
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
    """Write a file whole or not at all.

    Raises:
        OSError: it cannot be written; `path` is as it was.
    """
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
    mask = os.umask(0)
    os.umask(mask)
    return mask


def explained(error: OSError, given: Path) -> ArgumentError | UnavailableError:
    """What a user is told where writing `given` failed."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", -1)):
        return UnavailableError(f"{given} (-o) cannot be written: {reason}; free some space")
    return ArgumentError(f"{given} (-o) cannot be written: {reason}")
