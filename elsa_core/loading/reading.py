"""Files opened so that a name cannot stall or fill the machine: regular ones, within a bound."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from elsa_core.errors import ModelError

# The rest is for the interpreter, the libraries and what the model computes.
_MEMORY_SHARE = 0.8


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; links to one are followed.

    A FIFO without a writer would block and /dev/zero never ends, so both are refused at once.

    Raises:
        ModelError: no regular file, or one that cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise ModelError(f"{path} cannot be read: it is {_kind(kind)}, not a regular file")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, limit: int) -> str:
    """Read a UTF-8 text of at most `limit` bytes.

    Raises:
        ModelError: no regular file, a larger one, or other bytes than UTF-8.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(raw) > limit:
        raise ModelError(f"{path} is larger than {limit} bytes: not a configuration")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{path} is not UTF-8 text: not JSON") from None


def check_fits(path: Path, needed: int) -> None:
    """Refuse tensors of `needed` bytes that the machine's memory cannot hold.

    Raises:
        ModelError: says both sizes.
    """
    try:
        present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return
    if needed > _MEMORY_SHARE * present:
        raise ModelError(
            f"{path} holds {needed / 2**30:.1f} GiB of tensors; this machine has"
            f" {present / 2**30:.1f} GiB of memory"
        )


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "a directory",
        stat.S_ISFIFO: "a FIFO",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
        stat.S_ISSOCK: "a socket",
    }
    return next((words for test, words in kinds.items() if test(mode)), "a special file")
