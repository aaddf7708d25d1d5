"""The cache of built libraries: this user's own folder, each library beside the SHA-256 of itself.

A library is code that runs with the user's rights. One is loaded only where the folder and the file
belong to this user (or to root, who may do anything) and no other user can write to them or to a
folder above, so that what was looked at is what is loaded, and where its bytes have the digest that
was stored when it was built.

Environment variables:
    ELSA_CACHE_DIR: where built libraries are kept (default: the user's cache directory).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from elsa_core.base.files import flush, umask
from elsa_core.errors import UnavailableError

# Longer than a build may take.
LOCK_SECONDS = 660
_LARGEST_BYTES = 1 << 28
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_LOG = logging.getLogger("elsa")
_warn_once = functools.cache(_LOG.warning)


def directory() -> Path:
    """Where built libraries are kept, whether it is there already or not.

    The folder that ELSA_CACHE_DIR or the system names, links resolved, where it is this user's own
    and closed to others; else one that is, and a warning says so.

    Raises:
        UnavailableError: ELSA_CACHE_DIR names a home directory that does not exist, there is
            neither that variable nor a home directory, or no folder is this user's own.
    """
    import platformdirs

    usual: Path | None = Path(platformdirs.user_cache_dir("elsa"), "native")
    if str(usual).startswith("~"):  # this user has no home directory
        usual = None
    chosen = os.environ.get("ELSA_CACHE_DIR")
    try:
        wanted = Path(chosen).expanduser() / "native" if chosen else usual
    except RuntimeError:
        raise UnavailableError(
            f"ELSA_CACHE_DIR={chosen!r} names a home directory that does not exist; "
            "unset or correct ELSA_CACHE_DIR"
        ) from None
    if wanted is None:
        raise UnavailableError("this user has no home directory; set ELSA_CACHE_DIR")
    reason = not_own(wanted)
    if not reason:
        return Path(os.path.realpath(wanted))
    private = Path(tempfile.gettempdir()) / f"elsa-{os.geteuid()}" / "native"
    for place in (usual, private):
        if place is not None and place != wanted and not not_own(place):
            _warn_once("%s: %s is used instead", reason, place)
            return Path(os.path.realpath(place))
    raise UnavailableError(f"{reason}; set ELSA_CACHE_DIR to a directory of yours")


def make(folder: Path) -> None:
    """Make a folder and its missing parents, none of them writable by other users.

    Raises:
        OSError: it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o755, exist_ok=True)


def read(path: Path) -> bytes | None:
    """What a file of the cache holds; None where it is not there, not this user's own, or not what
    the digest that was stored beside it is of.

    Raises:
        UnavailableError: the cache cannot be read.
    """
    found = []
    try:
        for file in (path, Path(f"{path}.sha256")):
            descriptor = open_own(file)
            if descriptor is None:
                return None
            with open(descriptor, "rb") as opened:  # noqa: PTH123  # of a descriptor
                found.append(opened.read(_LARGEST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnavailableError(
            f"the cache {path.parent} cannot be read: {error.strerror or error}; "
            "set ELSA_CACHE_DIR to a directory of yours"
        ) from None
    content, stored = found
    return content if stored == f"{hashlib.sha256(content).hexdigest()}\n".encode() else None


def put(library: Path, path: Path) -> None:
    """Give a library that was just built its name in the cache, its digest beside it.

    Both are on the disk before: a crash must not leave half a library under its name.

    Raises:
        OSError: they cannot be written.
    """
    digest = Path(f"{library}.sha256")
    digest.write_bytes(f"{hashlib.sha256(library.read_bytes()).hexdigest()}\n".encode())
    for file, mode in ((library, 0o755), (digest, 0o644)):
        file.chmod(mode & ~umask())
        flush(file)
    # A library with the digest of another is built again; one without any would be as well.
    digest.replace(f"{path}.sha256")
    library.replace(path)


@contextmanager
def locked(path: Path, title: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of one library; waiting for another process that builds it is said.

    Raises:
        UnavailableError: another process has held it for too long.
        OSError: the lock's file cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(f"{path}.lock", mode=0o644)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        line = f"waiting for another process that builds the {title} ({path}.lock)"
        say(line)
        _LOG.warning("%s", line)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            raise UnavailableError(
                f"another process has held {path}.lock for {LOCK_SECONDS // 60} minutes"
            ) from None
    try:
        yield
    finally:
        lock.release()


def not_own(folder: Path) -> str:
    """Why other users could put libraries into a folder, or another one in its place; empty where
    they cannot."""
    real = Path(os.path.realpath(folder))
    for place in (real, *real.parents):
        try:
            facts = place.stat()
        except OSError:  # not there yet; other errors are raised where it is read
            continue
        if facts.st_uid not in (os.geteuid(), 0):
            return f"the cache {place} belongs to another user"
        # In a sticky folder (/tmp) only the owner of a file can move it.
        sticky = place != real and facts.st_mode & stat.S_ISVTX
        # What this package makes is closed to groups too; a home need not be, where nobody else is
        # in the group.
        closed = place in (real, real.parent)
        group = facts.st_mode & stat.S_IWGRP and (closed or not _is_private(facts.st_gid))
        if (facts.st_mode & stat.S_IWOTH or group) and not sticky:
            return f"other users may write to the cache {place} (`chmod go-w` closes it)"
    return ""


def _is_private(group: int) -> bool:
    """Whether it is the group of this user alone, which many systems make for each."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    alone = found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
    return group == user.pw_gid and alone


def open_own(path: Path) -> int | None:
    """A descriptor to read a file with; None for a link, a device and a file that is not this
    user's alone.

    Raises:
        OSError: it cannot be opened.
    """
    if path.is_symlink():
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    facts = os.fstat(descriptor)
    plain = stat.S_ISREG(facts.st_mode) and facts.st_size <= _LARGEST_BYTES
    own = facts.st_uid in (os.geteuid(), 0) and not facts.st_mode & _WRITABLE_BY_OTHERS
    if plain and own:
        return descriptor
    os.close(descriptor)
    return None
